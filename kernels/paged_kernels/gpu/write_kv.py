"""Plans the write of new K and V into the pool, with rotary positions on the way, and FP8 quantisation if wanted."""

import torch
from torch import Tensor

from paged_kernels.gpu.device.write_kv import write_kv_kernel
from paged_kernels.gpu.launch import KernelCall, ceil_divide, next_power_of_two
from paged_kernels.kv_scales import FP8, KVScales, scales_of_pool

_TILE_ELEMENTS = 2048  # in one half of the heads that a program rotates


def plan_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor],
    kv_pool: Tensor,
    layer: int,
    slot_mapping: Tensor,
    kv_scales: KVScales | None,
) -> KernelCall:
    """Plans the rotation of queries and keys, and the write."""
    num_tokens, num_kv_heads, head_dim = key.shape
    num_heads = query.shape[1]
    if any(rows.stride(-1) != 1 or rows.shape[0] != num_tokens for rows in (query, key, value)):
        raise ValueError("query, key and value must agree in tokens and have a contiguous last axis")
    if num_kv_heads != kv_pool.shape[1] or head_dim != kv_pool.shape[5]:
        raise ValueError(f"heads {tuple(key.shape[1:])} do not fit the pool {tuple(kv_pool.shape)}")
    fp8 = kv_pool.dtype is FP8
    key_scale, value_scale = scales_of_pool(kv_pool, layer, kv_scales)
    cos, sin = angles
    half_padded = next_power_of_two(head_dim // 2)
    heads = min(next_power_of_two(max(num_heads, num_kv_heads)), max(1, _TILE_ELEMENTS // half_padded))
    block, head, layer_stride, value_stride, token, _ = kv_pool.stride()
    return KernelCall(
        write_kv_kernel,
        (num_tokens, ceil_divide(num_kv_heads, heads) + ceil_divide(num_heads, heads)),
        {
            "query": query,
            "key": key,
            "value": value,
            "kv_pool": kv_pool.view(torch.uint8) if fp8 else kv_pool,
            "slot_mapping": slot_mapping,
            "cos": cos,
            "sin": sin,
            "key_scale": key_scale,
            "value_scale": value_scale,
            "layer": layer,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "query_token_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "key_token_stride": key.stride(0),
            "key_head_stride": key.stride(1),
            "value_token_stride": value.stride(0),
            "value_head_stride": value.stride(1),
            "angle_stride": cos.stride(0),
            "block_stride": block,
            "head_stride": head,
            "layer_stride": layer_stride,
            "value_stride": value_stride,
            "token_stride": token,
        },
        {
            "BLOCK_SIZE": kv_pool.shape[4],
            "HALF": head_dim // 2,
            "HALF_PADDED": half_padded,
            "HEADS": heads,
            "FP8": fp8,
        },
    )
