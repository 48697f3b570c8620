"""Attention of one or few new tokens per sequence, its KV split over programs ("flash decoding"), and the merge of the
splits.

A program owns one KV head of one sequence, TOKENS of its new tokens and one split of what they see; these tokens times
the query heads of that KV head are the rows of its tiles, so KV is read once. Sequences with more new tokens than
`num_tiles` such programs take are left to the prefill kernel.
"""

import triton
import triton.language as tl

from paged_kernels.gpu.device.fp8 import fit_to_codes
from paged_kernels.gpu.device.tiles import NOTHING_SEEN, attend_tiles


@triton.jit(do_not_specialize=["layer", "window", "num_tiles", "table_stride"])
def decode_attention_kernel(
    output,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    partial_output,  # [num_seqs * num_tiles * TOKENS, num_heads, num_splits, HEAD_DIM] float32, each normalised
    partial_weight,  # without HEAD_DIM, float32: log2 of the sum of exp2 of scores
    num_tiles,  # of new tokens, for each sequence
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
    TOKENS: tl.constexpr,  # at most ROWS // GROUP
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    FP8: tl.constexpr,
    CONVERT_FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Grid: (num_seqs * num_tiles, num_kv_heads, num_splits)."""
    entry, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    num_heads = tl.num_programs(1) * GROUP
    sequence = entry // num_tiles
    first_query = entry % num_tiles * TOKENS
    first_token = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - first_token
    if (first_query >= query_len) | (query_len > num_tiles * TOKENS):
        return
    prefix = tl.load(seq_lens + sequence) - query_len
    last = prefix + tl.minimum(first_query + TOKENS, query_len)
    first = 0
    if WINDOWED:
        first = tl.maximum(prefix + first_query + 1 - window, 0)
    tiles_per_split = tl.cdiv(tl.cdiv(last - first, TILE), num_splits)
    begin = first + split * tiles_per_split * TILE
    end = tl.minimum(begin + tiles_per_split * TILE, last)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    queries = first_query + rows // GROUP
    valid = (rows < TOKENS * GROUP) & (queries < query_len)
    tokens = (first_token + queries).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    row_mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = (tokens * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :]
    tile = tl.load(query + query_offsets, mask=row_mask, other=0.0)
    key_base = kv_pool + kv_head.to(tl.int64) * head_stride + layer.to(tl.int64) * layer_stride
    if FP8:
        scale *= tl.load(key_scale + kv_head)
        if tile.dtype == tl.bfloat16:
            tile, factors = fit_to_codes(tile)
            scale = scale * factors
    accumulator = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    maximum = tl.full([ROWS], NOTHING_SEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator, maximum, total = attend_tiles(
        accumulator,
        maximum,
        total,
        tile,
        prefix + queries,
        key_base,
        block_tables + sequence.to(tl.int64) * table_stride,
        begin,
        end,
        scale,
        window,
        block_stride,
        value_stride,
        token_stride,
        BLOCK_SIZE,
        HEAD_DIM,
        TILE,
        True,
        WINDOWED,
        FP8,
        CONVERT_FP8,
        PAIRS,
        DOT_FP32,
    )
    total_or_one = tl.where(total > 0.0, total, 1.0)
    attended = accumulator / total_or_one[:, None]
    if FP8:
        attended *= tl.load(value_scale + kv_head)
    if SPLIT:
        slots = entry.to(tl.int64) * TOKENS + rows // GROUP
        entries = (slots * num_heads + heads) * num_splits + split
        tl.store(partial_output + entries[:, None] * HEAD_DIM + dims[None, :], attended, mask=row_mask)
        weight = tl.where(total > 0.0, maximum + tl.log2(total_or_one), NOTHING_SEEN)
        tl.store(partial_weight + entries, weight, mask=valid)
    else:
        entries = tokens * num_heads + heads
        tl.store(output + entries[:, None] * HEAD_DIM + dims[None, :], attended, mask=row_mask)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def merge_splits_kernel(
    output,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    partial_output,
    partial_weight,
    query_start_loc,
    num_tokens,  # at most, of one sequence
    num_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits, padded to a power of two
):
    """Grid: (num_seqs * num_tokens, num_heads)."""
    slot, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    sequence = slot // num_tokens
    query = slot % num_tokens
    first_token = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - first_token
    if (query >= query_len) | (query_len > num_tokens):
        return
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    entries = (slot.to(tl.int64) * num_heads + head) * num_splits + splits
    weight = tl.load(partial_weight + entries, mask=splits < num_splits, other=NOTHING_SEEN)
    mask = (splits < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partial_output + entries[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    shares = tl.where(splits < num_splits, tl.exp2(weight - tl.max(weight, 0)), 0.0)
    merged = tl.sum(parts * shares[:, None], 0) / tl.sum(shares, 0)
    row = (first_token + query).to(tl.int64) * num_heads + head
    tl.store(output + row * HEAD_DIM + dims, merged, mask=dims < HEAD_DIM)
