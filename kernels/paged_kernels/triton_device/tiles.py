"""The inner loop that decode and prefill attention share: online softmax over tiles of paged KV.

FlashAttention-2 (arXiv:2307.08691) over PagedAttention's block tables (arXiv:2309.06180), in base 2: scores come
multiplied by log2(e). Rows may be any mixture of positions and heads that read one KV head. Maxima start from a large
negative number instead of -inf, so that a row that sees nothing of a tile computes no NaN.
"""

import triton
import triton.language as tl

from paged_kernels.triton_device.fp8 import decode_e4m3

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
def load_tile(pointers, mask, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Loads rows of K or V in the dtype of the products; what `mask` hides is 0."""
    stored = tl.load(pointers, mask=mask, other=0)
    if FP8:
        return decode_e4m3(stored).to(DTYPE)
    else:
        return stored


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
    scale,  # times log2(e)
    window,
    block_stride,
    value_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    FP8: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Adds tokens [begin, end) to the running softmax. Without MASKED every row sees all of them, and their number is a
    multiple of TILE."""
    dims = tl.arange(0, HEAD_DIM_PADDED)
    for start in tl.range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        held = positions < end
        block_ids = tl.load(block_table + positions // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        offsets = block_ids * block_stride + (positions % BLOCK_SIZE) * token_stride
        pointers = key_base + offsets[:, None] + dims[None, :]
        mask = held[:, None] & (dims < HEAD_DIM)[None, :]
        key = load_tile(pointers, mask, query.dtype, FP8)
        scores = matmul(query, tl.trans(key), DOT_FP32) * scale  # [ROWS, TILE]
        if MASKED:
            seen = held[None, :] & (positions[None, :] <= row_positions[:, None])
            if WINDOWED:
                seen = seen & (positions[None, :] > row_positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        correction = tl.exp2(maximum - new_maximum)
        total = total * correction + tl.sum(weights, 1)
        value = load_tile(pointers + value_stride, mask, query.dtype, FP8)
        accumulator = accumulator * correction[:, None] + matmul(weights.to(query.dtype), value, DOT_FP32)
        maximum = new_maximum
    return accumulator, maximum, total
