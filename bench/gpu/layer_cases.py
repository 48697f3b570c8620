"""What surrounds attention: KV writes, norms, SiLU-mul, products with published weights, sampling."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from paged_kernels import fused_reference, triton_rowwise
from paged_kernels.published_weight import PublishedFormat, PublishedWeight, unpack_codes, unpack_zeros
from paged_kernels.quantized_weight import Bits
from paged_kernels.triton_attention import TritonBackend
from paged_kernels.triton_digest import BlockDigests
from paged_kernels.triton_published import published_matmul
from paged_kernels.triton_sampling import sample_tokens
from torch import Tensor

from bench.gpu.case import Case
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


def layer_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    yield from _rowwise(sizes, dtype, device)
    yield _write(sizes, dtype, device)
    yield _published(PublishedFormat.AWQ, 4, sizes, dtype, device)
    yield _published(PublishedFormat.GPTQ, 4, sizes, dtype, device)
    yield _published(PublishedFormat.GPTQ, 8, sizes, dtype, device)
    yield _digests(sizes, device)
    for name, params in (
        ("greedy", SamplingParams(temperature=0.0)),
        ("temperature", SamplingParams(seed=1)),
        ("top-k, top-p", SamplingParams(seed=1, top_k=50, top_p=0.9)),
        ("top-p", SamplingParams(seed=1, top_p=0.95)),
    ):
        yield _sampling(name, params, sizes, device)


def _rowwise(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    x, residual = torch.randn(2, sizes.num_tokens, sizes.hidden_size, device=device, dtype=dtype)
    weight = torch.randn(sizes.hidden_size, device=device, dtype=dtype)
    gate_up = torch.randn(sizes.num_tokens, 2 * sizes.intermediate_size, device=device, dtype=dtype)
    yield Case(
        "residual + rms_norm",
        lambda: torch.cat(triton_rowwise.add_rms_norm(x, residual, weight, 1e-5)),
        lambda: torch.cat(fused_reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)),
        num_bytes=4 * x.numel() * x.element_size(),
    )
    yield Case(
        "silu_mul",
        lambda: triton_rowwise.silu_mul(gate_up),
        lambda: fused_reference.silu_mul(gate_up.double()),
        num_bytes=1.5 * gate_up.numel() * gate_up.element_size(),
    )


def _write(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    """Rotary and write together; what is compared is the pool and the rotated query, from fresh copies each time."""
    counts = [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads]
    projected = torch.randn(sizes.num_tokens, sum(counts), sizes.head_dim, device=device, dtype=dtype)
    angles = torch.rand(sizes.num_tokens, sizes.head_dim // 2, device=device) * 100
    num_blocks = -(-sizes.num_tokens // 16)
    slots = torch.randperm(num_blocks * 16, device=device)[: sizes.num_tokens]
    pool = torch.zeros(num_blocks, sizes.num_kv_heads, 1, 2, 16, sizes.head_dim, device=device, dtype=dtype)
    heads = torch.empty_like(projected)

    def run() -> Tensor:
        heads.copy_(projected)
        query, key, value = torch.split(heads, counts, dim=1)
        TritonBackend().write_kv_rotary(query, key, value, (angles.cos(), angles.sin()), pool, 0, slots)
        stored = pool[slots // 16, :, 0, :, slots % 16]  # [num_tokens, num_kv_heads, 2, head_dim]
        return torch.cat((query, stored[:, :, 0], stored[:, :, 1]), dim=1)

    def expected() -> Tensor:
        exact = projected.double()
        rotated = sizes.num_heads + sizes.num_kv_heads
        fused_reference.rotary(
            exact[:, : sizes.num_heads],
            exact[:, sizes.num_heads : rotated],
            angles.double().cos(),
            angles.double().sin(),
        )
        return exact

    return Case(
        "rotary + write_kv (and the copies around it)", run, expected, 6 * projected.numel() * heads.element_size()
    )


def _published(form: PublishedFormat, bits: Bits, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    num_inputs, num_outputs, group_size = sizes.hidden_size, sizes.intermediate_size, 128
    per_word, awq = 32 // bits, form is PublishedFormat.AWQ
    code_shape = (num_inputs, num_outputs // per_word) if awq else (num_inputs // per_word, num_outputs)
    zero_shape = (num_inputs // group_size, num_outputs // per_word)
    codes, zeros = (
        torch.randint(-(2**31), 2**31, shape, device=device).to(torch.int32) for shape in (code_shape, zero_shape)
    )
    scales = (torch.rand(num_inputs // group_size, num_outputs, device=device) * 0.01).to(dtype)
    weight = PublishedWeight(form, codes, zeros, scales, group_size, bits=bits)
    x = torch.randn(min(16, sizes.num_tokens), num_inputs, device=device, dtype=dtype)
    dense = dequantise(weight).to(dtype)
    num_bytes = 4 * (codes.numel() + zeros.numel()) + scales.numel() * 2 + x.numel() * 2 + len(x) * num_outputs * 2
    return Case(
        f"{form.value} {bits} bits {len(x)} x {num_inputs} x {num_outputs}",
        lambda: published_matmul(x, weight),
        lambda: x.double() @ dense.double(),
        num_bytes=num_bytes,
        num_flops=2 * len(x) * num_inputs * num_outputs,
        peers={"dense matmul": lambda: x @ dense},
    )


def dequantise(weight: PublishedWeight) -> Tensor:
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


def _sampling(name: str, params: SamplingParams, sizes: Sizes, device: torch.device) -> Case:
    num_rows = min(64, sizes.num_tokens)
    logits = torch.randn(num_rows, sizes.vocab_size, device=device) * 3
    rows = [SamplingRow(params, 0, index, 0, (), ()) for index in range(num_rows)]
    tensors = sampling_tensors(rows, (), device)

    def expected() -> Tensor:
        sampled = Sampler(sizes.vocab_size, ()).sample(logits.cpu(), rows)
        return torch.tensor([token.token_id for token in sampled])

    return Case(
        f"sampling {num_rows} rows, {name}", lambda: sample_tokens(logits, tensors), expected, logits.numel() * 4
    )
