"""Everything around attention: KV writes, norms, SiLU-mul, products with AWQ and GPTQ weights, digests, sampling."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from paged_kernels import fused_reference
from paged_kernels.cpu.quantized_weight import Bits
from paged_kernels.gpu import rowwise
from paged_kernels.gpu.attention import TritonBackend
from paged_kernels.gpu.digest import BlockDigests, key_table, plan_digests
from paged_kernels.gpu.launch import launch
from paged_kernels.gpu.sampling import SamplingTensors, sample_tokens
from paged_kernels.kv_scales import FP8, KVScales
from paged_kernels.prequantized_weight import PrequantizedFormat, PrequantizedWeight, dequantize
from torch import Tensor

from bench.gpu.case import TOLERANCE, Case, case_task
from bench.gpu.measure import Rates, Stopwatch
from bench.gpu.task import Task
from kv_connector.header import payload_digest
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.gpu.packed_arrays import PackedArrays
from kvrelay.engine.gpu.sampler import sampling_arrays
from kvrelay.engine.layers.prequantized_linear import TritonProduct
from kvrelay.engine.sampling.fixed_edits import fixed_edits
from kvrelay.engine.sampling.penalties import seen_tokens
from kvrelay.engine.sampling.sampler import Sampler, SamplingRow


@dataclass(frozen=True, slots=True)
class Sizes:
    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    prequantized_rows: tuple[int, ...]


# Format, bits, and whether groups are scattered (`desc_act`).
_PREQUANTIZED: tuple[tuple[PrequantizedFormat, Bits, bool], ...] = (
    (PrequantizedFormat.AWQ, 4, False),
    (PrequantizedFormat.GPTQ, 4, False),
    (PrequantizedFormat.GPTQ, 4, True),
    (PrequantizedFormat.GPTQ, 8, False),
    (PrequantizedFormat.GPTQ_V2, 4, False),
    (PrequantizedFormat.GPTQ_V2, 8, True),
)
_SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(seed=1),
    "top-k, top-p": SamplingParams(seed=1, top_k=50, top_p=0.9),
    "top-p": SamplingParams(seed=1, top_p=0.95),
    "min-p": SamplingParams(seed=1, min_p=0.05),
    "repetition penalty": SamplingParams(temperature=0.0, repetition_penalty=1.5),
    "presence penalty": SamplingParams(temperature=0.0, presence_penalty=2.0),
    "frequency penalty": SamplingParams(temperature=0.0, frequency_penalty=1.0),
    "logit bias": SamplingParams(seed=1, logit_bias=((5, 15.0), (7, 14.0), (9, -50.0))),
}


def layer_tasks(sizes: Sizes, dtype: torch.dtype, watch: Stopwatch, rates: Rates) -> Iterator[Task]:
    device = watch.device
    makers: list[tuple[str, Callable[[], Case]]] = [
        ("rms_norm", partial(_norm, sizes, dtype, device)),
        ("residual + rms_norm", partial(_residual_norm, sizes, dtype, device)),
        ("silu_mul", partial(_silu, sizes, dtype, device)),
        ("rotary + write_kv", partial(_write, sizes, dtype, dtype, device)),
        ("rotary + write_kv to FP8", partial(_write, sizes, dtype, FP8, device)),
        (f"digests of {sizes.num_tokens} blocks", partial(_digests, sizes, device)),
    ]
    for rows in sizes.prequantized_rows:
        for form, bits, scattered in _PREQUANTIZED:
            kind = f"{form.value} {bits} bits{' desc_act' if scattered else ''}"
            name = f"{kind} {rows} x {sizes.hidden_size} x {sizes.intermediate_size}"
            makers.append((name, partial(_prequantized, form, bits, scattered, rows, sizes, dtype, device)))
    for name, params in _SAMPLING.items():
        makers.append((f"sampling {sizes.num_tokens} rows, {name}", partial(_sampling, params, sizes, device)))
    for name, make in makers:
        yield case_task(name, make, watch, rates)


def _norm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    x = torch.randn(sizes.num_tokens, sizes.hidden_size, device=device, dtype=dtype)
    weight = torch.randn(sizes.hidden_size, device=device, dtype=dtype)
    return Case(
        lambda: rowwise.rms_norm(x, weight, 1e-5),
        lambda: fused_reference.rms_norm(x.double(), weight.double(), 1e-5),
        num_bytes=2 * x.numel() * x.element_size(),
    )


def _residual_norm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    x, residual = torch.randn(2, sizes.num_tokens, sizes.hidden_size, device=device, dtype=dtype)
    weight = torch.randn(sizes.hidden_size, device=device, dtype=dtype)
    return Case(
        lambda: torch.cat(rowwise.add_rms_norm(x, residual, weight, 1e-5)),
        lambda: torch.cat(fused_reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)),
        num_bytes=4 * x.numel() * x.element_size(),
        timed=lambda: rowwise.add_rms_norm(x, residual, weight, 1e-5),
    )


def _silu(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    gate_up = torch.randn(sizes.num_tokens, 2 * sizes.intermediate_size, device=device, dtype=dtype)
    return Case(
        lambda: rowwise.silu_mul(gate_up),
        lambda: fused_reference.silu_mul(gate_up.double()),
        num_bytes=1.5 * gate_up.numel() * gate_up.element_size(),
    )


def _write(sizes: Sizes, dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device) -> Case:
    """Makes a case of the KV write with rotary positions. Compared are the pool and the query, computed from fresh
    copies each time. FP8 is off by a sixteenth at most."""
    counts = [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads]
    projected = torch.randn(sizes.num_tokens, sum(counts), sizes.head_dim, device=device, dtype=dtype)
    angles = torch.rand(sizes.num_tokens, sizes.head_dim // 2, device=device) * 100
    num_blocks = -(-sizes.num_tokens // 16)
    slots = torch.randperm(num_blocks * 16, device=device)[: sizes.num_tokens]
    pool = torch.zeros(num_blocks, sizes.num_kv_heads, 1, 2, 16, sizes.head_dim, device=device, dtype=pool_dtype)
    key_scales, value_scales = (0.5 + torch.rand(2, 1, sizes.num_kv_heads, device=device)).unbind()
    scales = KVScales(key_scales.contiguous(), value_scales.contiguous()) if pool_dtype is FP8 else None
    heads = torch.empty_like(projected)
    query, key, value = torch.split(heads, counts, dim=1)
    cos, sin = angles.cos(), angles.sin()
    backend = TritonBackend(scales)
    write = partial(backend.write_kv_rotary, query, key, value, (cos, sin), pool, 0, slots)

    def run() -> Tensor:
        heads.copy_(projected)
        write()
        bits = pool.view(torch.uint8) if pool_dtype is FP8 else pool  # torch indexes no FP8 tensor
        stored = bits[slots // 16, :, 0, :, slots % 16]  # [num_tokens, num_kv_heads, 2, head_dim]
        if scales is not None:
            stacked = torch.stack((scales.key[0], scales.value[0]), dim=-1)[None, :, :, None]
            stored = (stored.contiguous().view(FP8).float() * stacked).to(dtype)
        return torch.cat((query, stored[:, :, 0], stored[:, :, 1]), dim=1)

    def expected() -> Tensor:
        exact = projected.double()
        rotated = sizes.num_heads + sizes.num_kv_heads
        exact_angles = angles.double().cos(), angles.double().sin()
        fused_reference.rotary(exact[:, : sizes.num_heads], exact[:, sizes.num_heads : rotated], *exact_angles)
        return exact

    tolerance = TOLERANCE[dtype] if scales is None else (0.07, 2**-7)
    num_bytes = 2 * key.numel() * (dtype.itemsize + pool_dtype.itemsize)
    num_bytes += 2 * query.numel() * dtype.itemsize + cos.nbytes + sin.nbytes
    return Case(run, expected, num_bytes, tolerance=tolerance, timed=write)


def _prequantized(
    form: PrequantizedFormat,
    bits: Bits,
    scattered: bool,
    num_rows: int,
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    num_inputs, num_outputs, group_size = sizes.hidden_size, sizes.intermediate_size, 128
    per_word, awq = 32 // bits, form is PrequantizedFormat.AWQ
    code_shape = (num_inputs, num_outputs // per_word) if awq else (num_inputs // per_word, num_outputs)
    zero_shape = (num_inputs // group_size, num_outputs // per_word)
    codes, zeros = (
        torch.randint(-(2**31), 2**31, shape, device=device).to(torch.int32) for shape in (code_shape, zero_shape)
    )
    scales = (torch.rand(num_inputs // group_size, num_outputs, device=device) * 0.01).to(dtype)
    groups = (torch.randperm(num_inputs, device=device) // group_size).int() if scattered else None
    weight = PrequantizedWeight(form, codes, zeros, scales, group_size, groups, bits)
    x = torch.randn(num_rows, num_inputs, device=device, dtype=dtype)
    dense = dequantize(weight).to(dtype)
    product = TritonProduct(weight)
    num_bytes = 4 * (codes.numel() + zeros.numel()) + scales.numel() * 2 + x.numel() * 2 + len(x) * num_outputs * 2
    return Case(
        lambda: product(x, None),
        lambda: x.double() @ dense.double(),
        num_bytes=num_bytes,
        num_flops=2 * len(x) * num_inputs * num_outputs,
        peers={"dense matmul": lambda: x @ dense},
    )


def _digests(sizes: Sizes, device: torch.device) -> Case:
    """Makes a case of the digests of `num_tokens` KV blocks, of all layers in bfloat16 each."""
    num_bytes = sizes.num_layers * 2 * 16 * sizes.num_kv_heads * sizes.head_dim * 2
    rows = torch.randint(0, 256, (sizes.num_tokens, num_bytes), dtype=torch.uint8, device=device)
    digests = BlockDigests(rows)
    words, keys = rows.view(torch.int64), torch.tensor(key_table(), dtype=torch.int64, device=device)
    ids = torch.arange(len(rows), device=device)
    found = torch.empty(len(rows), 2, dtype=torch.int64, device=device)

    def expected() -> list[bytes]:
        return [payload_digest(row.numpy().tobytes()) for row in rows.cpu()]

    return Case(
        lambda: _as_tensor(digests(range(len(rows)))),
        lambda: _as_tensor(expected()),
        num_bytes=rows.numel(),
        timed=lambda: launch(plan_digests(found, words, ids, keys)),
    )


def _as_tensor(digests: list[bytes]) -> Tensor:
    return torch.tensor([list(digest) for digest in digests])


def sampling_tensors(rows: Sequence[SamplingRow], device: torch.device) -> SamplingTensors:
    """Returns what the kernel reads for `rows`, in one piece of memory."""
    packed = PackedArrays(sampling_arrays(rows, ()))
    memory = torch.empty(packed.num_bytes, dtype=torch.uint8, device=device)
    packed.to(memory)
    return SamplingTensors(**packed.views(memory))


def _row(params: SamplingParams, position: int, prompt: list[int], output: list[int]) -> SamplingRow:
    seen = seen_tokens(params, prompt)
    if seen is not None:
        seen.add(output)
    return SamplingRow(params, 0, position, len(output), seen, fixed_edits(params))


def _sampling(params: SamplingParams, sizes: Sizes, device: torch.device) -> Case:
    logits = torch.randn(sizes.num_tokens, sizes.vocab_size, device=device) * 3
    likely = logits.topk(3).indices.tolist()  # the outputs so far: without penalties they are sampled again
    rows = [_row(params, 5 + index, ids[1:], ids[:1] * 3) for index, ids in enumerate(likely)]
    tensors = sampling_tensors(rows, device)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=device)

    def run() -> Tensor:
        sample_tokens(logits, tensors, token_ids)
        return token_ids

    def expected() -> Tensor:
        sampled = Sampler(()).sample(logits.cpu(), rows)
        return torch.tensor([token.token_id for token in sampled])

    return Case(run, expected, logits.numel() * 4)
