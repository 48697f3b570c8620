"""Attention of one new token per sequence, its KV split over programs ("flash decoding"), and the merge of the splits.

A program owns one KV head of one sequence and one split of its tokens; all query heads of that KV head are the rows of
its tiles, so KV is read once. Sequences with another number of new tokens are left to the prefill kernel.
"""

import triton
import triton.language as tl

from paged_kernels.triton_device.tiles import NOTHING_SEEN, attend_tiles


@triton.jit(do_not_specialize=["layer", "window", "table_stride"])
def decode_attention_kernel(
    output,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    partial_output,  # [num_seqs, num_heads, num_splits, HEAD_DIM] float32, each normalised
    partial_weight,  # [num_seqs, num_heads, num_splits] float32: log2 of the sum of exp2 of scores
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
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    FP8: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Grid: (num_seqs, num_kv_heads, num_splits)."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    num_heads = tl.num_programs(1) * GROUP
    token = tl.load(query_start_loc + sequence)
    if tl.load(query_start_loc + sequence + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + sequence)
    first = 0
    if WINDOWED:
        first = tl.maximum(seq_len - window, 0)
    tiles_per_split = tl.cdiv(tl.cdiv(seq_len - first, TILE), num_splits)
    begin = first + split * tiles_per_split * TILE
    end = tl.minimum(begin + tiles_per_split * TILE, seq_len)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    heads = kv_head * GROUP + rows
    row_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = token.to(tl.int64) * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
    tile = tl.load(query + query_offsets, mask=row_mask, other=0.0)
    key_base = kv_pool + kv_head.to(tl.int64) * head_stride + layer.to(tl.int64) * layer_stride
    if FP8:
        scale *= tl.load(key_scale + kv_head)
    accumulator = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    maximum = tl.full([ROWS], NOTHING_SEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator, maximum, total = attend_tiles(
        accumulator,
        maximum,
        total,
        tile,
        tl.zeros([ROWS], tl.int32) + (seq_len - 1),
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
        HEAD_DIM_PADDED,
        TILE,
        True,
        WINDOWED,
        FP8,
        DOT_FP32,
    )
    total_or_one = tl.where(total > 0.0, total, 1.0)
    attended = accumulator / total_or_one[:, None]
    if FP8:
        attended *= tl.load(value_scale + kv_head)
    if SPLIT:
        entries = (sequence.to(tl.int64) * num_heads + heads) * num_splits + split
        tl.store(partial_output + entries[:, None] * HEAD_DIM + dims[None, :], attended, mask=row_mask)
        weight = tl.where(total > 0.0, maximum + tl.log2(total_or_one), NOTHING_SEEN)
        tl.store(partial_weight + entries, weight, mask=rows < GROUP)
    else:
        entries = token.to(tl.int64) * num_heads + heads
        tl.store(output + entries[:, None] * HEAD_DIM + dims[None, :], attended, mask=row_mask)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    output,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    partial_output,
    partial_weight,
    query_start_loc,
    num_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits, padded to a power of two
):
    """Grid: (num_seqs, num_heads)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    token = tl.load(query_start_loc + sequence)
    if tl.load(query_start_loc + sequence + 1) - token != 1:
        return
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    entries = (sequence.to(tl.int64) * num_heads + head) * num_splits + splits
    weight = tl.load(partial_weight + entries, mask=splits < num_splits, other=NOTHING_SEEN)
    mask = (splits < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partial_output + entries[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    shares = tl.where(splits < num_splits, tl.exp2(weight - tl.max(weight, 0)), 0.0)
    merged = tl.sum(parts * shares[:, None], 0) / tl.sum(shares, 0)
    row = token.to(tl.int64) * num_heads + head
    tl.store(output + row * HEAD_DIM + dims, merged, mask=dims < HEAD_DIM)
