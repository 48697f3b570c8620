"""Attention metadata for a batch of sequences that are all alike, in shuffled blocks."""

import torch
from paged_kernels.base import AttentionMetadata


def even_batch(
    num_seqs: int, prefix: int, new: int, *, block_size: int, device: torch.device | None = None
) -> AttentionMetadata:
    """Returns metadata for `num_seqs` sequences of `new` query tokens behind `prefix` earlier ones. All KV counts as
    present, so `slot_mapping` is empty and nothing is written."""
    length = prefix + new
    blocks = -(-length // block_size)
    return AttentionMetadata(
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        block_tables=torch.randperm(num_seqs * blocks, device=device).view(num_seqs, blocks).int(),
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * new,
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=device),
        max_query_len=new,
        max_seq_len=length,
    )
