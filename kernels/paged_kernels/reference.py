"""The attention backend in plain torch: the oracle of every kernel's tests, and what nodes run where there are no
compiled kernels, or none for the model's heads.

Gathers each sequence's blocks and computes attention with two matrix products in float32 (float64 for a float64 pool).
"""

import torch
from torch import Tensor

from paged_kernels.base import AttentionMetadata
from paged_kernels.fused import rotary
from paged_kernels.kv_scales import FP8, KVScales, LayerScales, encode, scales_of_pool

_MAX_SCORES = 1 << 24  # query rows are handled in pieces that keep the score matrix below this many elements


class ReferenceBackend:
    """`AttentionBackend` on any device torch knows. Reads nothing of the pool beyond each sequence's tokens. A
    float8_e4m3fn pool, with `kv_scales`, is encoded and widened by torch."""

    name = "reference"

    def __init__(self, kv_scales: KVScales | None = None) -> None:
        self._kv_scales = kv_scales

    def write_kv(self, key: Tensor, value: Tensor, kv_pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
        block_size = kv_pool.shape[4]
        blocks = slot_mapping // block_size
        offsets = slot_mapping % block_size
        key_scale, value_scale = scales_of_pool(kv_pool, layer, self._kv_scales)
        if key_scale is not None and value_scale is not None:
            key, value = encode(key, key_scale[:, None]), encode(value, value_scale[:, None])
            kv_pool, key, value = (tensor.view(torch.uint8) for tensor in (kv_pool, key, value))
        kv_pool[blocks, :, layer, 0, offsets] = key
        kv_pool[blocks, :, layer, 1, offsets] = value

    def write_kv_rotary(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_pool: Tensor,
        layer: int,
        slot_mapping: Tensor,
    ) -> None:
        rotary(query, key, *angles)
        self.write_kv(key, value, kv_pool, layer, slot_mapping)

    def attend(
        self,
        query: Tensor,
        kv_pool: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        starts = metadata.query_start_loc.tolist()
        scales = scales_of_pool(kv_pool, layer, self._kv_scales)
        for index, seq_len in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[index], starts[index + 1]
            if begin == end:
                continue
            visible = 0 if sliding_window is None else max(0, seq_len - (end - begin) + 1 - sliding_window)
            key, value = _gather(kv_pool, layer, metadata.block_tables[index], visible, seq_len, scales)
            rows = max(1, _MAX_SCORES // (seq_len * query.shape[1]))
            for first in range(begin, end, rows):
                last = min(first + rows, end)
                position = seq_len - end + first - visible  # of the first query row, in the gathered KV
                output[first:last] = _attend_sequence(query[first:last], key, value, position, scale, sliding_window)
        return output


def _gather(
    kv_pool: Tensor, layer: int, block_table: Tensor, begin: int, end: int, scales: LayerScales
) -> tuple[Tensor, Tensor]:
    """Returns K and V of tokens [begin, end), each `[num_kv_heads, end - begin, head_dim]`, in the dtype of the
    sums."""
    block_size = kv_pool.shape[4]
    first_block = begin // block_size
    block_ids = block_table[first_block : -(-end // block_size)].long()
    stored = kv_pool.view(torch.uint8) if kv_pool.dtype is FP8 else kv_pool  # torch indexes no FP8 tensor
    blocks = stored[block_ids, :, layer]  # [num_blocks, num_kv_heads, 2, block_size, head_dim]
    offset = first_block * block_size
    tokens = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, begin - offset : end - offset]
    key_scale, value_scale = scales
    if key_scale is not None and value_scale is not None:
        key, value = tokens.contiguous().view(FP8).float()
        return key * key_scale[:, None, None], value * value_scale[:, None, None]
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return wide[0], wide[1]


def _attend_sequence(
    query: Tensor, key: Tensor, value: Tensor, first_position: int, scale: float, sliding_window: int | None
) -> Tensor:
    """Returns the attention of `query` `[num_queries, num_heads, head_dim]`, from `first_position` on, over gathered
    KV."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, seq_len, _ = key.shape
    grouped = query.to(key.dtype).view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    rows = grouped.permute(1, 2, 0, 3).flatten(1, 2)  # [num_kv_heads, group * num_queries, head_dim]
    scores = (rows @ key.transpose(1, 2)).mul_(scale).view(num_kv_heads, -1, num_queries, seq_len)
    positions = torch.arange(first_position, first_position + num_queries, device=query.device)[:, None]
    kv_positions = torch.arange(seq_len, device=query.device)
    hidden = kv_positions > positions
    if sliding_window is not None:
        hidden |= kv_positions <= positions - sliding_window
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1).flatten(1, 2)
    output = (weights @ value).view(num_kv_heads, -1, num_queries, head_dim)
    return output.permute(2, 0, 1, 3).reshape(query.shape).to(query.dtype)
