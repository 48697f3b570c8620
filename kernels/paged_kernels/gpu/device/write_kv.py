"""Rotary positions and the write of new K and V into the pool, in one pass over the projected heads.

Rounds where `fused_reference.rotary` does. A token whose slot is negative is padding: nothing of it is written.
"""

import triton
import triton.language as tl

from paged_kernels.gpu.device.fp8 import encode_e4m3


@triton.jit
def store_kv(pointers, rows, mask, inverse_scale, FP8: tl.constexpr):
    if FP8:
        tl.store(pointers, encode_e4m3(rows.to(tl.float32) * inverse_scale), mask=mask)
    else:
        tl.store(pointers, rows, mask=mask)


@triton.jit(do_not_specialize=["layer"])
def write_kv_kernel(
    query,  # rotated in place
    key,  # left as it is
    value,
    kv_pool,
    slot_mapping,
    cos,  # [num_tokens, at least HEAD_DIM / 2] float32
    sin,
    key_scale,  # [num_kv_heads] float32, read with FP8 only
    value_scale,
    layer,
    num_heads,
    num_kv_heads,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    angle_stride,
    block_stride,
    head_stride,
    layer_stride,
    value_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # of head_dim
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    FP8: tl.constexpr,
):
    """Grid: (num_tokens, cdiv(num_kv_heads, HEADS) + cdiv(num_heads, HEADS))."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    dims = tl.arange(0, HALF_PADDED)
    inside = dims < HALF
    cosine = tl.load(cos + token * angle_stride + dims, mask=inside, other=0.0)[None, :]
    sine = tl.load(sin + token * angle_stride + dims, mask=inside, other=0.0)[None, :]
    num_kv_parts = tl.cdiv(num_kv_heads, HEADS)
    if part < num_kv_parts:
        heads = part * HEADS + tl.arange(0, HEADS)
        mask = (heads < num_kv_heads)[:, None] & inside[None, :]
        key_pointers = key + token * key_token_stride + heads[:, None] * key_head_stride + dims[None, :]
        low = tl.load(key_pointers, mask=mask, other=0.0)
        high = tl.load(key_pointers + HALF, mask=mask, other=0.0)
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        low = (wide_low * cosine - wide_high * sine).to(low.dtype)
        high = (wide_high * cosine + wide_low * sine).to(high.dtype)
        value_pointers = value + token * value_token_stride + heads[:, None] * value_head_stride + dims[None, :]
        value_low = tl.load(value_pointers, mask=mask, other=0.0)
        value_high = tl.load(value_pointers + HALF, mask=mask, other=0.0)
        inverse_key_scale = 1.0
        inverse_value_scale = 1.0
        if FP8:
            of_key = tl.load(key_scale + heads, mask=heads < num_kv_heads, other=1.0)[:, None]
            of_value = tl.load(value_scale + heads, mask=heads < num_kv_heads, other=1.0)[:, None]
            inverse_key_scale = tl.div_rn(1.0, of_key)  # rounded like everywhere: a code must not depend on the device
            inverse_value_scale = tl.div_rn(1.0, of_value)
        row = kv_pool + (slot // BLOCK_SIZE) * block_stride + layer.to(tl.int64) * layer_stride
        row += (slot % BLOCK_SIZE) * token_stride
        pointers = row + heads.to(tl.int64)[:, None] * head_stride + dims[None, :]
        store_kv(pointers, low, mask, inverse_key_scale, FP8)
        store_kv(pointers + HALF, high, mask, inverse_key_scale, FP8)
        store_kv(pointers + value_stride, value_low, mask, inverse_value_scale, FP8)
        store_kv(pointers + value_stride + HALF, value_high, mask, inverse_value_scale, FP8)
    else:
        query_heads = (part - num_kv_parts) * HEADS + tl.arange(0, HEADS)
        query_mask = (query_heads < num_heads)[:, None] & inside[None, :]
        query_rows = query + token * query_token_stride + query_heads[:, None] * query_head_stride + dims[None, :]
        query_low = tl.load(query_rows, mask=query_mask, other=0.0)
        query_high = tl.load(query_rows + HALF, mask=query_mask, other=0.0)
        wide_low, wide_high = query_low.to(tl.float32), query_high.to(tl.float32)
        tl.store(query_rows, (wide_low * cosine - wide_high * sine).to(query_low.dtype), mask=query_mask)
        tl.store(query_rows + HALF, (wide_high * cosine + wide_low * sine).to(query_low.dtype), mask=query_mask)
