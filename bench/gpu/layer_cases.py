"""What surrounds attention: KV writes, norms, SiLU-mul, products with AWQ and GPTQ weights, sampling."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from paged_kernels import fused_reference, triton_rowwise
from paged_kernels.kv_scales import FP8, KVScales
from paged_kernels.prequantized_weight import PrequantizedFormat, PrequantizedWeight, unpack_codes, unpack_zeros
from paged_kernels.quantized_weight import Bits
from paged_kernels.triton_attention import TritonBackend
from paged_kernels.triton_digest import BlockDigests
from paged_kernels.triton_prequantized import prequantized_matmul
from paged_kernels.triton_sampling import sample_tokens
from torch import Tensor

from bench.gpu.case import TOLERANCE, Case
from bench.gpu.measure import Rates, Stopwatch
from bench.gpu.report import Result
from bench.gpu.task import Task
from kv_connector.header import payload_digest
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.engine.gpu.sampler import sampling_tensors
from kvrelay.engine.sampling.sampler import Sampler, SamplingRow


@dataclass(frozen=True, slots=True)
class Sizes:
    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    prequantized_rows: tuple[int, ...]


_PREQUANTIZED: tuple[tuple[PrequantizedFormat, Bits], ...] = (
    (PrequantizedFormat.AWQ, 4),
    (PrequantizedFormat.GPTQ, 4),
    (PrequantizedFormat.GPTQ, 8),
)
_SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(seed=1),
    "top-k, top-p": SamplingParams(seed=1, top_k=50, top_p=0.9),
    "top-p": SamplingParams(seed=1, top_p=0.95),
}


def layer_tasks(sizes: Sizes, dtype: torch.dtype, watch: Stopwatch, rates: Rates) -> Iterator[Task]:
    device = watch.device
    makers: list[tuple[str, Callable[[], Case]]] = [
        ("residual + rms_norm", partial(_norm, sizes, dtype, device)),
        ("silu_mul", partial(_silu, sizes, dtype, device)),
        ("rotary + write_kv (and the copies around it)", partial(_write, sizes, dtype, dtype, device)),
        ("rotary + write_kv to FP8 (and the copies around it)", partial(_write, sizes, dtype, FP8, device)),
        (f"digests of {sizes.num_tokens} blocks", partial(_digests, sizes, device)),
    ]
    for rows in sizes.prequantized_rows:
        for form, bits in _PREQUANTIZED:
            name = f"{form.value} {bits} bits {rows} x {sizes.hidden_size} x {sizes.intermediate_size}"
            makers.append((name, partial(_prequantized, form, bits, rows, sizes, dtype, device)))
    for name, params in _SAMPLING.items():
        makers.append((f"sampling {sizes.num_tokens} rows, {name}", partial(_sampling, params, sizes, device)))
    for name, make in makers:
        yield Task(name, partial(_measured, name, make, watch, rates))


def _measured(name: str, make: Callable[[], Case], watch: Stopwatch, rates: Rates) -> Result:
    return replace(make().measure(watch, rates), name=name)


def _norm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    x, residual = torch.randn(2, sizes.num_tokens, sizes.hidden_size, device=device, dtype=dtype)
    weight = torch.randn(sizes.hidden_size, device=device, dtype=dtype)
    return Case(
        "residual + rms_norm",
        lambda: torch.cat(triton_rowwise.add_rms_norm(x, residual, weight, 1e-5)),
        lambda: torch.cat(fused_reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)),
        num_bytes=4 * x.numel() * x.element_size(),
    )


def _silu(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    gate_up = torch.randn(sizes.num_tokens, 2 * sizes.intermediate_size, device=device, dtype=dtype)
    return Case(
        "silu_mul",
        lambda: triton_rowwise.silu_mul(gate_up),
        lambda: fused_reference.silu_mul(gate_up.double()),
        num_bytes=1.5 * gate_up.numel() * gate_up.element_size(),
    )


def _write(sizes: Sizes, dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device) -> Case:
    """Rotary and write together; what is compared is the pool and the rotated query, from fresh copies each time. FP8
    is off by a sixteenth at most."""
    counts = [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads]
    projected = torch.randn(sizes.num_tokens, sum(counts), sizes.head_dim, device=device, dtype=dtype)
    angles = torch.rand(sizes.num_tokens, sizes.head_dim // 2, device=device) * 100
    num_blocks = -(-sizes.num_tokens // 16)
    slots = torch.randperm(num_blocks * 16, device=device)[: sizes.num_tokens]
    pool = torch.zeros(num_blocks, sizes.num_kv_heads, 1, 2, 16, sizes.head_dim, device=device, dtype=pool_dtype)
    key_scales, value_scales = (0.5 + torch.rand(2, 1, sizes.num_kv_heads, device=device)).unbind()
    scales = KVScales(key_scales.contiguous(), value_scales.contiguous()) if pool_dtype is FP8 else None
    heads = torch.empty_like(projected)

    def run() -> Tensor:
        heads.copy_(projected)
        query, key, value = torch.split(heads, counts, dim=1)
        TritonBackend(scales).write_kv_rotary(query, key, value, (angles.cos(), angles.sin()), pool, 0, slots)
        bits = pool.view(torch.uint8) if pool_dtype is FP8 else pool  # torch indexes no FP8 tensor
        stored = bits[slots // 16, :, 0, :, slots % 16]  # [num_tokens, num_kv_heads, 2, head_dim]
        if scales is not None:
            stacked = torch.stack((scales.key[0], scales.value[0]), dim=-1)[None, :, :, None]
            stored = (stored.contiguous().view(FP8).float() * stacked).to(dtype)
        return torch.cat((query, stored[:, :, 0], stored[:, :, 1]), dim=1)

    def expected() -> Tensor:
        exact = projected.double()
        rotated = sizes.num_heads + sizes.num_kv_heads
        cos, sin = angles.double().cos(), angles.double().sin()
        fused_reference.rotary(exact[:, : sizes.num_heads], exact[:, sizes.num_heads : rotated], cos, sin)
        return exact

    tolerance = TOLERANCE[dtype] if scales is None else (0.07, 2**-7)
    return Case("write_kv", run, expected, 6 * projected.numel() * heads.element_size(), tolerance=tolerance)


def _prequantized(
    form: PrequantizedFormat, bits: Bits, num_rows: int, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Case:
    num_inputs, num_outputs, group_size = sizes.hidden_size, sizes.intermediate_size, 128
    per_word, awq = 32 // bits, form is PrequantizedFormat.AWQ
    code_shape = (num_inputs, num_outputs // per_word) if awq else (num_inputs // per_word, num_outputs)
    zero_shape = (num_inputs // group_size, num_outputs // per_word)
    codes, zeros = (
        torch.randint(-(2**31), 2**31, shape, device=device).to(torch.int32) for shape in (code_shape, zero_shape)
    )
    scales = (torch.rand(num_inputs // group_size, num_outputs, device=device) * 0.01).to(dtype)
    weight = PrequantizedWeight(form, codes, zeros, scales, group_size, bits=bits)
    x = torch.randn(num_rows, num_inputs, device=device, dtype=dtype)
    dense = dequantise(weight).to(dtype)
    num_bytes = 4 * (codes.numel() + zeros.numel()) + scales.numel() * 2 + x.numel() * 2 + len(x) * num_outputs * 2
    return Case(
        f"{form.value} {bits} bits {len(x)} x {num_inputs} x {num_outputs}",
        lambda: prequantized_matmul(x, weight),
        lambda: x.double() @ dense.double(),
        num_bytes=num_bytes,
        num_flops=2 * len(x) * num_inputs * num_outputs,
        peers={"dense matmul": lambda: x @ dense},
    )


def dequantise(weight: PrequantizedWeight) -> Tensor:
    """`[num_inputs, num_outputs]` float32."""
    groups = torch.arange(weight.num_inputs, device=weight.codes.device) // weight.group_size
    return (unpack_codes(weight) - unpack_zeros(weight)[groups]).float() * weight.scales.float()[groups]


def _digests(sizes: Sizes, device: torch.device) -> Case:
    """Of as many KV blocks as hold the tokens, with 32 layers of bfloat16."""
    num_bytes = 32 * 2 * 16 * sizes.num_kv_heads * sizes.head_dim * 2
    rows = torch.randint(0, 256, (sizes.num_tokens, num_bytes), dtype=torch.uint8, device=device)
    digests = BlockDigests(rows)
    wanted = range(len(rows))

    def expected() -> list[bytes]:
        return [payload_digest(row.numpy().tobytes()) for row in rows.cpu()]

    return Case(
        f"digests of {len(rows)} blocks of {num_bytes >> 10} KiB",
        lambda: _as_tensor(digests(wanted)),
        lambda: _as_tensor(expected()),
        num_bytes=rows.numel(),
    )


def _as_tensor(digests: list[bytes]) -> Tensor:
    return torch.tensor([list(digest) for digest in digests])


def _sampling(params: SamplingParams, sizes: Sizes, device: torch.device) -> Case:
    num_rows = sizes.num_tokens
    logits = torch.randn(num_rows, sizes.vocab_size, device=device) * 3
    rows = [SamplingRow(params, 0, index, 0, (), ()) for index in range(num_rows)]
    tensors = sampling_tensors(rows, (), device)

    def expected() -> Tensor:
        sampled = Sampler(sizes.vocab_size, ()).sample(logits.cpu(), rows)
        return torch.tensor([token.token_id for token in sampled])

    return Case("sampling", lambda: sample_tokens(logits, tensors), expected, logits.numel() * 4)
