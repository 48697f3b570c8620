"""Decode and prefill attention over a shuffled pool, compared with torch's SDPA and FlexAttention over contiguous KV.
Then batches of all kinds, whose results are checked rather than their speed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from paged_kernels.base import AttentionMetadata
from paged_kernels.gpu.attention import TritonBackend
from paged_kernels.kv_scales import FP8, KVScales
from paged_kernels.reference import ReferenceBackend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from bench.even_batch import even_batch
from bench.gpu.bars import FLASH
from bench.gpu.case import Case, case_task
from bench.gpu.measure import Rates, Stopwatch
from bench.gpu.task import Task


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of a model's attention, and what to measure with them: `decode` lists (batch, context), `prefill` (prefix,
    new tokens) of one sequence. The pool has `num_layers` layers like an engine's, so that what one layer reads lies as
    far apart as there."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_layers: int
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]


def attention_tasks(shapes: Shapes, dtype: torch.dtype, watch: Stopwatch, rates: Rates) -> Iterator[Task]:
    for pool_dtype in (dtype, FP8):
        kind = f"{str(pool_dtype).removeprefix('torch.')} KV"
        for batch, context in shapes.decode:
            name = f"decode {batch} x {context}, {kind}"
            case = partial(_case, shapes, dtype, pool_dtype, batch, context - 1, 1, watch.device)
            yield case_task(name, case, watch, rates)
        for prefix, new in shapes.prefill:
            name = f"prefill {new} after {prefix}, {kind}"
            case = partial(_case, shapes, dtype, pool_dtype, 1, prefix, new, watch.device)
            yield case_task(name, case, watch, rates)


def flex_tasks(shapes: Shapes, dtype: torch.dtype, watch: Stopwatch, rates: Rates) -> Iterator[Task]:
    """Yields the comparisons with FlexAttention, which is compiled for each shape."""
    decode = ((f"decode {batch} x {context}", batch, context - 1, 1) for batch, context in shapes.decode)
    prefill = ((f"prefill {new} after {prefix}", 1, prefix, new) for prefix, new in shapes.prefill)
    for what, batch, prefix, new in (*decode, *prefill):
        name = f"{what}, beside FlexAttention"
        case = partial(_case, shapes, dtype, dtype, batch, prefix, new, watch.device, by_flex=True)
        yield case_task(name, case, watch, rates)


def _case(
    shapes: Shapes,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    batch: int,
    prefix: int,
    new: int,
    device: torch.device,
    *,
    by_flex: bool = False,
) -> Case:
    metadata = even_batch(batch, prefix, new, block_size=shapes.block_size, device=device)
    shape = (metadata.block_tables.numel(), shapes.num_kv_heads, 1, 2, shapes.block_size, shapes.head_dim)
    stored, scales = random_pool(shape, dtype, pool_dtype, device)
    layer = shapes.num_layers // 2
    pool = torch.empty(*shape[:2], shapes.num_layers, *shape[3:], dtype=pool_dtype, device=device)
    pool[:, :, layer] = stored[:, :, 0]
    query = torch.randn(batch * new, shapes.num_heads, shapes.head_dim, device=device, dtype=dtype)
    backend = TritonBackend(
        scales and KVScales(scales.key.repeat(shapes.num_layers, 1), scales.value.repeat(shapes.num_layers, 1))
    )
    scale = shapes.head_dim**-0.5
    seen = new * (prefix + (new + 1) / 2)  # pairs of a query and a token that it attends to
    return Case(
        lambda: backend.attend(query, pool, layer, metadata, scale=scale),
        lambda: ReferenceBackend().attend(query.double(), exact_pool(stored, scales), 0, metadata, scale=scale),
        num_bytes=stored.numel() * stored.element_size() + 2 * query.numel() * query.element_size(),
        num_flops=4 * batch * seen * shapes.num_heads * shapes.head_dim,
        peers={} if pool_dtype == FP8 else _peers(shapes, query, batch, prefix, new, by_flex=by_flex),
    )


def random_pool(
    shape: tuple[int, ...], dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, KVScales | None]:
    """Returns a pool `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`, and for FP8 its scales, one for
    each head of each layer."""
    pool = torch.randn(shape, device=device, dtype=dtype)
    if pool_dtype != FP8:
        return pool, None
    key, value = (0.01 * torch.rand(2, shape[2], shape[1], device=device) + 0.01).unbind()
    scales = KVScales(key.contiguous(), value.contiguous())
    stacked = torch.stack((key, value), dim=-1).transpose(0, 1)[None, :, :, :, None, None]
    return (pool.float() / stacked).clamp(-448, 448).to(FP8), scales


def exact_pool(pool: Tensor, scales: KVScales | None) -> Tensor:
    """Returns the values that the pool stands for, in float64."""
    if scales is None:
        return pool.double()
    stacked = torch.stack((scales.key, scales.value), dim=-1).transpose(0, 1)[None, :, :, :, None, None]
    return pool.to(torch.float32).double() * stacked.double()


def _peers(
    shapes: Shapes, query: Tensor, batch: int, prefix: int, new: int, *, by_flex: bool
) -> dict[str, Callable[[], object]]:
    """Returns torch's implementations over contiguous KV: FlexAttention, which is compiled at its first call, or all
    others."""
    length = prefix + new
    q = query.view(batch, new, shapes.num_heads, shapes.head_dim).transpose(1, 2).contiguous()
    kv = torch.randn(2, batch, shapes.num_kv_heads, length, shapes.head_dim, device=query.device, dtype=query.dtype)
    key, value = kv.unbind()
    causal = new > 1 and not prefix
    if by_flex:
        made = cache(partial(_flex, q, key, value, prefix))
        return {"flex": lambda: made()()} if query.device.type == "cuda" else {}

    def sdpa() -> Tensor:
        mask = causal_lower_right(new, length) if new > 1 and prefix else None
        return scaled_dot_product_attention(q, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True)

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa()

    peers: dict[str, Callable[[], object]] = {"sdpa": sdpa}
    if query.device.type == "cuda":
        peers[FLASH] = flash
    return peers


def _flex(query: Tensor, key: Tensor, value: Tensor, prefix: int) -> Callable[[], object]:
    mask = create_block_mask(
        lambda b, h, query_index, kv_index: query_index + prefix >= kv_index,
        B=None,
        H=None,
        Q_LEN=query.shape[2],
        KV_LEN=key.shape[2],
        device=str(query.device),
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of `sequences` of (prefix, new tokens). Padding sequences are (0, 0) and come last: they have a row, but
    no tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    pool_dtype: torch.dtype
    sequences: tuple[tuple[int, int], ...]
    window: int | None = None
    block_size: int = 16

    @property
    def name(self) -> str:
        dtypes = f"{self.dtype}, {self.pool_dtype} KV".replace("torch.", "")
        new = [new for _, new in self.sequences]
        kind = "decodes" if max(new) == 1 else "mixed" if min(new) < 2 else "prompts"
        window = f", window {self.window}" if self.window else ""
        return f"{kind} {self.num_heads}/{self.num_kv_heads} x {self.head_dim} {dtypes}{window}"


def batch_tasks(batches: tuple[Batch, ...], watch: Stopwatch, rates: Rates) -> Iterator[Task]:
    for batch in batches:
        yield case_task(batch.name, partial(_batch_case, batch, watch.device), watch, rates)


def _batch_case(batch: Batch, device: torch.device) -> Case:
    lengths = [prefix + new for prefix, new in batch.sequences]
    rows = [max(1, new) for _, new in batch.sequences]  # a padding sequence has a row, too
    starts = torch.tensor([0, *rows]).cumsum(0).int().to(device)
    width = max(-(-length // batch.block_size) for length in lengths)
    num_real = sum(length > 0 for length in lengths)
    ids = torch.randperm(len(lengths) * width, device=device).view(len(lengths), width).int()
    shape = (len(lengths) * width, batch.num_kv_heads, 2, 2, batch.block_size, batch.head_dim)
    pool, scales = random_pool(shape, batch.dtype, batch.pool_dtype, device)
    query = torch.randn(sum(rows), batch.num_heads, batch.head_dim, device=device, dtype=batch.dtype)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    metadata = AttentionMetadata(nothing, ids, starts, lens, max(rows), max(lengths))
    real = replace(metadata, seq_lens=lens[:num_real])
    num_real_rows = sum(rows[:num_real])
    scale = batch.head_dim**-0.5
    backend = TritonBackend(scales)

    def expected() -> Tensor:
        found = torch.zeros(query.shape, dtype=torch.float64, device=device)
        exact = exact_pool(pool, scales)
        attended = ReferenceBackend().attend(query.double(), exact, 1, real, scale=scale, sliding_window=batch.window)
        found[:num_real_rows] = attended[:num_real_rows]
        return found

    before = max(lengths) if batch.window is None else batch.window - 1  # the most that new tokens see of a prefix
    num_seen = sum(new + min(prefix, before) for prefix, new in batch.sequences)
    num_bytes = num_seen * 2 * batch.num_kv_heads * batch.head_dim * pool.element_size()
    return Case(
        lambda: backend.attend(query, pool, 1, metadata, scale=scale, sliding_window=batch.window),
        expected,
        num_bytes=num_bytes + 2 * query.numel() * query.element_size(),
    )
