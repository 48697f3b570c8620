"""The inner loop that decode and prefill attention share: online softmax over tiles of paged KV.

FlashAttention-2 (arXiv:2307.08691) over PagedAttention's block tables (arXiv:2309.06180), in base 2: scores come
multiplied by log2(e). Rows may be any mixture of positions and heads that read one KV head. Maxima start from a large
negative number instead of -inf, so that a row that sees nothing of a tile computes no NaN.
"""

import triton
import triton.language as tl

from paged_kernels.gpu.device.fp8 import decode_e4m3, decode_pairs

NOTHING_SEEN = tl.constexpr(-1.0e30)


@triton.jit
def matmul(a, b, DOT_FP32: tl.constexpr):
    """Multiplies with float32 sums. DOT_FP32 widens the operands first: Triton's interpreter multiplies bfloat16
    matrices wrongly."""
    if DOT_FP32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_tile(rows, dims, mask, PAIRS: tl.constexpr):
    """Loads rows of K or V; what `mask` hides is 0."""
    if PAIRS:
        rows = rows.to(tl.pointer_type(tl.int16))
    return tl.load(rows[:, None] + dims[None, :], mask=mask, other=0)


@triton.jit
def split_pairs(rows):
    """Returns the even and the odd columns."""
    return tl.split(rows.reshape(rows.shape[0], rows.shape[1] // 2, 2))


@triton.jit
def join_pairs(even, odd):
    return tl.join(even, odd).reshape(even.shape[0], 2 * even.shape[1])


@triton.jit
def attend_tiles(
    accumulator,  # [ROWS, HEAD_DIM_PADDED] float32
    maximum,  # [ROWS]
    total,  # [ROWS]
    query,  # [ROWS, HEAD_DIM_PADDED]
    row_positions,  # [ROWS]
    key_base,  # of this head and layer in block 0
    block_table,
    begin,
    end,
    scale,  # times log2(e); one, or [ROWS, 1]
    window,
    block_stride,
    value_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    FP8: tl.constexpr,
    CONVERT_FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Adds tokens [begin, end) to the running softmax. Without MASKED every row sees all of them, and their number is a
    multiple of TILE.

    With PAIRS two FP8 codes are read as one 16-bit number, and even and odd dimensions are multiplied apart. So a tile
    is decoded where its products need it: 8-bit codes would come from shared memory one by one."""
    if PAIRS:
        query, odd_query = split_pairs(query)
        accumulator, odd_accumulator = split_pairs(accumulator)
    dims = tl.arange(0, query.shape[1])
    inside = dims < (HEAD_DIM // 2 if PAIRS else HEAD_DIM)
    for start in tl.range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        held = positions < end
        block_ids = tl.load(block_table + positions // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        rows = key_base + block_ids * block_stride + (positions % BLOCK_SIZE) * token_stride
        mask = held[:, None] & inside[None, :]
        key = load_tile(rows, dims, mask, PAIRS)
        if PAIRS:
            even, odd = decode_pairs(key, CONVERT_FP8)
            scores = matmul(query, tl.trans(even.to(query.dtype)), DOT_FP32)
            scores += matmul(odd_query, tl.trans(odd.to(query.dtype)), DOT_FP32)
        else:
            if FP8:
                key = decode_e4m3(key, CONVERT_FP8).to(query.dtype)
            scores = matmul(query, tl.trans(key), DOT_FP32)
        scores *= scale  # [ROWS, TILE]
        if MASKED:
            seen = held[None, :] & (positions[None, :] <= row_positions[:, None])
            if WINDOWED:
                seen = seen & (positions[None, :] > row_positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        correction = tl.exp2(maximum - new_maximum)
        total = total * correction + tl.sum(weights, 1)
        weights = weights.to(query.dtype)
        value = load_tile(rows + value_stride, dims, mask, PAIRS)
        if PAIRS:
            even, odd = decode_pairs(value, CONVERT_FP8)
            value = even.to(query.dtype)
            odd_accumulator *= correction[:, None]
            odd_accumulator += matmul(weights, odd.to(query.dtype), DOT_FP32)
        elif FP8:
            value = decode_e4m3(value, CONVERT_FP8).to(query.dtype)
        accumulator = accumulator * correction[:, None] + matmul(weights, value, DOT_FP32)
        maximum = new_maximum
    if PAIRS:
        accumulator = join_pairs(accumulator, odd_accumulator)
    return accumulator, maximum, total
