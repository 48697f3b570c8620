"""Decode and prefill attention over a shuffled pool, beside torch's SDPA and FlexAttention over contiguous KV."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from paged_kernels.base import AttentionMetadata
from paged_kernels.kv_scales import KVScales
from paged_kernels.reference import ReferenceBackend
from paged_kernels.triton_attention import TritonBackend
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.case import Case

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Shapes:
    """`decode`: (batch, context); `prefill`: (prefix, new tokens) of one sequence."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]


def attention_cases(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for batch, context in shapes.decode:
        for pool_dtype in (dtype, FP8):
            yield _case(f"decode {batch} x {context}", shapes, dtype, pool_dtype, batch, context - 1, 1, device)
    for prefix, new in shapes.prefill:
        yield _case(f"prefill {new} after {prefix}", shapes, dtype, dtype, 1, prefix, new, device)


def _case(
    name: str,
    shapes: Shapes,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    batch: int,
    prefix: int,
    new: int,
    device: torch.device,
) -> Case:
    length = prefix + new
    blocks = -(-length // shapes.block_size)
    shape = (batch * blocks, shapes.num_kv_heads, 1, 2, shapes.block_size, shapes.head_dim)
    pool = torch.randn(shape, device=device, dtype=dtype)
    scales = torch.full((1, shapes.num_kv_heads), 0.01, device=device)
    if pool_dtype == FP8:
        pool = (pool.float() / 0.01).clamp(-448, 448).to(FP8)
    metadata = AttentionMetadata(
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        block_tables=torch.randperm(batch * blocks, device=device).view(batch, blocks).int(),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device) * new,
        seq_lens=torch.full((batch,), length, dtype=torch.int32, device=device),
        max_query_len=new,
        max_seq_len=length,
    )
    query = torch.randn(batch * new, shapes.num_heads, shapes.head_dim, device=device, dtype=dtype)
    backend = TritonBackend(KVScales(scales, scales) if pool_dtype == FP8 else None)
    scale = shapes.head_dim**-0.5

    def expected() -> Tensor:
        exact = pool.double() * scales[0, 0].double() if pool_dtype == FP8 else pool.double()
        return ReferenceBackend().attend(query.double(), exact, 0, metadata, scale=scale)

    seen = new * (prefix + (new + 1) / 2)  # pairs of a query and a token that it sees
    return Case(
        f"{name}, {str(pool_dtype).removeprefix('torch.')} KV",
        lambda: backend.attend(query, pool, 0, metadata, scale=scale),
        expected,
        num_bytes=pool.numel() * pool.element_size() + 2 * query.numel() * query.element_size(),
        num_flops=4 * batch * seen * shapes.num_heads * shapes.head_dim,
        peers={} if pool_dtype == FP8 else _peers(shapes, query, batch, prefix, new),
    )


def _peers(shapes: Shapes, query: Tensor, batch: int, prefix: int, new: int) -> dict[str, Callable[[], object]]:
    """Over contiguous KV. SDPA's flash kernels know causality without a prefix only."""
    length = prefix + new
    q = query.view(batch, new, shapes.num_heads, shapes.head_dim).transpose(1, 2).contiguous()
    kv = torch.randn(batch, shapes.num_kv_heads, length, shapes.head_dim, device=query.device, dtype=query.dtype)
    peers: dict[str, Callable[[], object]] = {}
    if new == 1 or prefix == 0:
        causal = new > 1
        peers["sdpa"] = lambda: scaled_dot_product_attention(q, kv, kv, is_causal=causal, enable_gqa=True)
    if query.device.type == "cuda":
        mask = create_block_mask(
            lambda b, h, query_index, kv_index: query_index + prefix >= kv_index,
            B=None,
            H=None,
            Q_LEN=new,
            KV_LEN=length,
            device=str(query.device),
        )
        compiled = torch.compile(flex_attention, dynamic=False)
        peers["flex"] = lambda: compiled(q, kv, kv, block_mask=mask, enable_gqa=True)
    return peers
