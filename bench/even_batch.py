"""A batch of sequences that are alike, in blocks that are in disorder, as attention gets it."""

import torch
from paged_kernels.base import AttentionMetadata


def even_batch(
    num_seqs: int, prefix: int, new: int, *, block_size: int, device: torch.device | None = None
) -> AttentionMetadata:
    """`new` tokens of each behind `prefix`. The KV of all is there: nothing is to be written."""
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
