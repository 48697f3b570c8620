"""The attention kernels with other launch parameters than the chosen ones: whether the choice fits this GPU.

The result of each variant is compared with that of the chosen parameters before it is timed. A variant that does not
fit on the GPU, or gives another result, is not our failure, and is only logged."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from paged_kernels.gpu.attention import AttentionCall, plan_attention
from paged_kernels.gpu.launch import GpuTraits, KernelCall, launch, traits_of

from bench.even_batch import even_batch
from bench.gpu.case import deviation
from bench.gpu.measure import Rates, Stopwatch
from bench.gpu.report import Result
from bench.gpu.task import Task

_logger = logging.getLogger(__name__)
_GROUP, _HEAD_DIM, _BLOCK_SIZE = 4, 128, 16


@dataclass(frozen=True, slots=True)
class Variant:
    """Launch parameters. `rows` are those of a prefill program, `splits` those of a decode; 0 keeps the chosen
    number."""

    tile: int
    num_warps: int
    num_stages: int
    rows: int = 0
    splits: int = 0

    def __str__(self) -> str:
        rows = f" rows {self.rows}" if self.rows else ""
        splits = f" splits {self.splits}" if self.splits else ""
        return f"tile {self.tile} warps {self.num_warps} stages {self.num_stages}{rows}{splits}"


# Four stages compile to the same code as three, and prefill of 128 rows by four warps spills registers.
DECODE = (
    *(Variant(tile, warps, stages) for tile in (32, 64, 128) for warps in (4, 8) for stages in (2, 3, 5)),
    *(Variant(64, 4, stages, splits=splits) for splits in (1, 2, 4, 8) for stages in (3, 5)),
)
PREFILL = tuple(
    Variant(tile, warps, stages, rows=rows)
    for rows, warps in ((256, 8), (128, 8), (64, 4))
    for tile in (32, 64, 128)
    for stages in (2, 3)
)


def tuning_tasks(
    shapes: Sequence[tuple[int, int, int]], num_kv_heads: int, dtype: torch.dtype, watch: Stopwatch, rates: Rates
) -> Iterator[Task]:
    """Yields a task for each of `shapes`, (batch, prefix, new tokens) with the heads of an 8B model, or fewer of them:
    such a model has 8 KV heads. The parts of its result are the times of the variants."""
    for batch, prefix, new in shapes:
        name = f"variants of {f'decode {batch} x {prefix + 1}' if new == 1 else f'prefill {new} after {prefix}'}"
        yield Task(name, partial(_variants, name, batch, prefix, new, num_kv_heads, dtype, watch, rates))


def _variants(
    name: str,
    batch: int,
    prefix: int,
    new: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    watch: Stopwatch,
    rates: Rates,
) -> Result:
    """Measures the chosen parameters, and as parts of the result each variant by name, the fastest first."""
    call = _call(batch, prefix, new, num_kv_heads, dtype, watch.device)
    traits = traits_of(watch.device)
    chosen = plan_attention(call, traits)
    launch(chosen)
    expected = call.output.double()
    seconds = watch.seconds(lambda: launch(chosen))
    times = {}
    for variant in DECODE if new == 1 else PREFILL:
        try:
            calls = varied(call, variant, traits)
            call.output.fill_(float("nan"))
            launch(calls)
            if deviation(call.output, expected) <= 1.0:
                times[str(variant)] = watch.seconds(partial(launch, calls))
            else:
                _logger.error("%s, %s: another result", name, variant)
        except Exception as error:  # Triton raises errors of many kinds for what a GPU lacks
            _logger.warning("%s, %s: %s", name, variant, error)
    num_bytes = call.kv_pool.numel() * call.kv_pool.element_size()
    num_flops = 4 * call.query.numel() * (prefix + (new + 1) / 2)
    parts = dict(sorted(times.items(), key=lambda item: item[1]))
    return Result(name, 0.0, seconds, rates.floor_seconds(num_bytes, num_flops), parts=parts)


def varied(call: AttentionCall, variant: Variant, traits: GpuTraits) -> list[KernelCall]:
    """Returns the launches of `call` with the parameters of `variant`."""
    num_seqs, num_kv_heads = len(call.metadata.seq_lens), call.kv_pool.shape[1]
    if variant.splits:
        traits = replace(traits, num_sms=max(1, variant.splits * num_seqs * num_kv_heads // 4))
    first, *others = plan_attention(call, traits)
    constants = dict(first.constants) | {"TILE": variant.tile}
    grid = first.grid
    if variant.rows:
        tokens = variant.rows // call.group
        constants |= {"ROWS": variant.rows, "TOKENS": tokens}
        grid = (len(call.query) // tokens + num_seqs, num_kv_heads)
    varied = replace(first, grid=grid, constants=constants, num_warps=variant.num_warps, num_stages=variant.num_stages)
    return [varied, *others]


def _call(
    batch: int, prefix: int, new: int, num_kv_heads: int, dtype: torch.dtype, device: torch.device
) -> AttentionCall:
    metadata = even_batch(batch, prefix, new, block_size=_BLOCK_SIZE, device=device)
    shape = (metadata.block_tables.numel(), num_kv_heads, 1, 2, _BLOCK_SIZE, _HEAD_DIM)
    query = torch.randn(batch * new, _GROUP * num_kv_heads, _HEAD_DIM, device=device, dtype=dtype)
    pool = torch.randn(shape, device=device, dtype=dtype)
    return AttentionCall(torch.empty_like(query), query, pool, 0, metadata, _HEAD_DIM**-0.5, None, None)
