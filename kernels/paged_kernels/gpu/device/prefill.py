"""Causal attention of many new tokens per sequence over their prefix and themselves.

A program owns one KV head and a tile of rows: consecutive new tokens of one sequence times the query heads that share
the KV head. The grid is bounded from the number of tokens alone: sequence i's tiles begin at entry
`query_start_loc[i] // TOKENS + i`, which a program inverts by bisection, so nothing is read back to the host.
"""

import triton
import triton.language as tl

from paged_kernels.gpu.device.fp8 import fit_to_codes
from paged_kernels.gpu.device.tiles import NOTHING_SEEN, attend_tiles


@triton.jit
def sequence_of_tile(query_start_loc, num_seqs, tile, TOKENS: tl.constexpr):
    """Returns the last sequence whose first tile is not after `tile`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["layer", "window", "num_seqs", "table_stride"])
def prefill_attention_kernel(
    output,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    num_seqs,
    query,
    kv_pool,
    block_tables,
    query_start_loc,
    seq_lens,
    key_scale,  # [num_kv_heads] float32, read with FP8 only
    value_scale,
    layer,
    scale,
    window,
    query_token_stride,
    query_head_stride,
    table_stride,
    block_stride,
    head_stride,
    layer_stride,
    value_stride,
    token_stride,
    GROUP: tl.constexpr,  # query heads of a KV head
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,  # ROWS // GROUP
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SKIP_DECODES: tl.constexpr,
    FP8: tl.constexpr,
    CONVERT_FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Grid: (num_tokens // TOKENS + num_seqs, num_kv_heads). The last tiles of a prompt see most and start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    sequence = sequence_of_tile(query_start_loc, num_seqs, tile, TOKENS)
    first_token = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - first_token
    first_query = (tile - first_token // TOKENS - sequence) * TOKENS
    if first_query >= query_len:
        return
    if SKIP_DECODES:
        if query_len == 1:
            return
    seq_len = tl.load(seq_lens + sequence)
    prefix = seq_len - query_len

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    queries = first_query + rows // GROUP
    valid = (rows < TOKENS * GROUP) & (queries < query_len)
    entries = (first_token + queries).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    row_mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = (entries * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :]
    query_tile = tl.load(query + query_offsets, mask=row_mask, other=0.0)
    row_positions = prefix + queries
    if FP8:
        scale *= tl.load(key_scale + kv_head)
        if query_tile.dtype == tl.bfloat16:
            query_tile, factors = fit_to_codes(query_tile)
            scale = scale * factors

    # Tokens that every row sees lie between two ranges in which rows differ.
    first_position = prefix + first_query
    end = prefix + tl.minimum(first_query + TOKENS, query_len)
    begin = 0
    full_begin = 0
    if WINDOWED:
        begin = tl.maximum(first_position - window + 1, 0)
        full_begin = begin + tl.cdiv(tl.maximum(end - window - begin, 0), TILE) * TILE
        full_begin = tl.minimum(full_begin, end)
    full_end = tl.maximum(begin + (first_position + 1 - begin) // TILE * TILE, full_begin)

    table = block_tables + sequence.to(tl.int64) * table_stride
    key_base = kv_pool + kv_head.to(tl.int64) * head_stride + layer.to(tl.int64) * layer_stride
    accumulator = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    maximum = tl.full([ROWS], NOTHING_SEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        part_begin = begin if part == 0 else (full_begin if part == 1 else full_end)
        part_end = full_begin if part == 0 else (full_end if part == 1 else end)
        accumulator, maximum, total = attend_tiles(
            accumulator,
            maximum,
            total,
            query_tile,
            row_positions,
            key_base,
            table,
            part_begin,
            part_end,
            scale,
            window,
            block_stride,
            value_stride,
            token_stride,
            BLOCK_SIZE,
            HEAD_DIM,
            TILE,
            part != 1,
            WINDOWED,
            FP8,
            CONVERT_FP8,
            PAIRS,
            DOT_FP32,
        )
    attended = accumulator / tl.where(total > 0.0, total, 1.0)[:, None]
    if FP8:
        attended *= tl.load(value_scale + kv_head)
    output_offsets = ((entries * num_heads + heads) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(output + output_offsets, attended, mask=row_mask)
