"""Every launch that an engine makes, once for each kind of tensors: what is compiled ahead of time.

Nothing here runs: launches are planned over tensors without memory, as for a GPU with the given traits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from paged_kernels.base import AttentionMetadata
from paged_kernels.cpu.quantized_weight import Bits
from paged_kernels.gpu.attention import AttentionCall, plan_attention
from paged_kernels.gpu.digest import plan_digests
from paged_kernels.gpu.launch import GpuTraits, KernelCall
from paged_kernels.gpu.prequantized import plan_dequantize, plan_product, product_tiles
from paged_kernels.gpu.rowwise import plan_rms_norm, plan_silu_mul
from paged_kernels.gpu.sampling import SamplingTensors, plan_sample
from paged_kernels.gpu.write_kv import plan_write_kv
from paged_kernels.kv_scales import KVScales
from paged_kernels.prequantized_weight import PrequantizedFormat, PrequantizedWeight
from torch import Tensor

from tests.kernels.batch import Heads

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Step:
    """What of a batch decides how attention is launched."""

    name: str
    num_tokens: int
    num_seqs: int
    max_query_len: int


MIXED = Step("of three sequences", 400, 3, 398)  # decode in splits, their merge, prefill that leaves decodes out
FEW = Step("of few tokens", 400, 100, 16)
STEPS = (MIXED, FEW, Step("of decodes", 256, 256, 1), Step("of one prompt", 2048, 1, 2048))

# (heads, dtype of queries, dtype of the pool, sliding window)
ATTENTION = [
    (Heads(32, 8, 128), torch.bfloat16, torch.bfloat16, None),
    (Heads(32, 8, 128, 32), torch.float16, torch.float16, 4096),
    (Heads(28, 4, 128), torch.float32, torch.float32, None),
    (Heads(32, 8, 128), torch.bfloat16, FP8, None),
    (Heads(32, 8, 64), torch.bfloat16, torch.bfloat16, None),
    (Heads(32, 8, 64), torch.bfloat16, FP8, None),
    (Heads(8, 1, 80), torch.bfloat16, FP8, None),  # an integer that is 1 is known to the compiler
    (Heads(16, 8, 256), torch.bfloat16, torch.bfloat16, 512),
]


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def all_launches(traits: GpuTraits) -> Iterator[tuple[str, KernelCall]]:
    """Yields launches, each with a name that says what it is for."""
    for heads, dtype, pool_dtype, window in ATTENTION:
        label = f"{heads.num_heads}x{heads.num_kv_heads}x{heads.head_dim} {dtype} {pool_dtype} window {window}"
        for step in STEPS if heads.head_dim == 128 else (MIXED, FEW):
            for call in _attention(heads, dtype, pool_dtype, window, step, traits):
                yield f"{call.kernel.__name__} {label} {step.name}", call
        if window is None:
            yield f"write_kv_kernel {label}", _write(heads, dtype, pool_dtype)
    yield from _rowwise()
    yield from _prequantized(traits)
    yield "sample_kernel", _sample()
    yield from _digests()


def _attention(
    heads: Heads, dtype: torch.dtype, pool_dtype: torch.dtype, window: int | None, step: Step, traits: GpuTraits
) -> Iterator[KernelCall]:
    metadata = AttentionMetadata(
        slot_mapping=empty(step.num_tokens, dtype=torch.int64),
        block_tables=empty(step.num_seqs, 512, dtype=torch.int32),
        query_start_loc=empty(step.num_seqs + 1, dtype=torch.int32),
        seq_lens=empty(step.num_seqs, dtype=torch.int32),
        max_query_len=step.max_query_len,
        max_seq_len=4096,
    )
    query = empty(step.num_tokens, heads.num_heads, heads.head_dim, dtype=dtype)
    output, pool = torch.empty_like(query), _pool(heads, pool_dtype)
    call = AttentionCall(output, query, pool, 3, metadata, 0.1, window, _scales(heads, pool_dtype))
    yield from plan_attention(call, traits)


def _write(heads: Heads, dtype: torch.dtype, pool_dtype: torch.dtype) -> KernelCall:
    projected = empty(400, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, dtype=dtype)
    query, key, value = torch.split(projected, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    angles = empty(400, heads.head_dim // 2, dtype=torch.float32)
    slots = empty(400, dtype=torch.int64)
    pool = _pool(heads, pool_dtype)
    return plan_write_kv(query, key, value, (angles, angles), pool, 3, slots, _scales(heads, pool_dtype))


def _pool(heads: Heads, dtype: torch.dtype) -> Tensor:
    return empty(900, heads.num_kv_heads, 32, 2, heads.block_size, heads.head_dim, dtype=dtype)


def _scales(heads: Heads, pool_dtype: torch.dtype) -> KVScales | None:
    if pool_dtype != FP8:
        return None
    scales = empty(32, heads.num_kv_heads, dtype=torch.float32)
    return KVScales(scales, scales)


def _rowwise() -> Iterator[tuple[str, KernelCall]]:
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = empty(64, 4096, dtype=dtype), empty(4096, dtype=dtype)
        yield f"rms_norm_kernel {dtype}", plan_rms_norm(x, None, x, None, weight, 1e-5)
        yield f"rms_norm_kernel add {dtype}", plan_rms_norm(x, x, x, x, weight, 1e-5)
        yield f"silu_mul_kernel {dtype}", plan_silu_mul(x, empty(64, 8192, dtype=dtype))
    rows, head_weight = empty(2048, 128, dtype=torch.bfloat16), empty(128, dtype=torch.bfloat16)
    yield "rms_norm_kernel of heads", plan_rms_norm(rows, None, rows, None, head_weight, 1e-5)


def _prequantized(traits: GpuTraits) -> Iterator[tuple[str, KernelCall]]:
    cases: tuple[tuple[PrequantizedFormat, Bits, int, bool, int, torch.dtype], ...] = (
        (PrequantizedFormat.AWQ, 4, 1, False, 128, torch.bfloat16),
        (PrequantizedFormat.AWQ, 4, 256, False, 32, torch.float16),
        (PrequantizedFormat.GPTQ, 4, 1, False, 128, torch.float16),
        (PrequantizedFormat.GPTQ, 4, 256, True, 128, torch.bfloat16),
        (PrequantizedFormat.GPTQ, 4, 64, False, 128, torch.float32),
        (PrequantizedFormat.GPTQ, 8, 1, True, 128, torch.float16),
        (PrequantizedFormat.GPTQ, 8, 64, False, 128, torch.bfloat16),
    )
    for form, bits, num_rows, has_bias, group_size, dtype in cases:
        words = 4096 * bits // 32
        code_shape = (4096, words) if form is PrequantizedFormat.AWQ else (words, 4096)
        codes = empty(*code_shape, dtype=torch.int32)
        num_groups = 4096 // group_size
        zeros, scales = empty(num_groups, words, dtype=torch.int32), empty(num_groups, 4096, dtype=torch.float16)
        weight = PrequantizedWeight(form, codes, zeros, scales, group_size, bits=bits)
        x, output = empty(num_rows, 4096, dtype=dtype), empty(num_rows, 4096, dtype=dtype)
        bias = empty(4096, dtype=dtype) if has_bias else None
        label = f"{form} {bits} bits {num_rows} rows {dtype}"
        if dtype != torch.float32:  # torch multiplies those
            for call in plan_product(output, x, weight, bias, product_tiles(x, weight, traits), traits):
                yield f"{call.kernel.__name__} {label}", call
        dense = empty(4096, 4096, dtype=dtype)
        yield f"dequantize_kernel {label}", plan_dequantize(dense, weight)


def _sample() -> KernelCall:
    wide = {"top_ps": torch.float64, "repetitions": torch.float64, "seeds": torch.int64}
    narrow = ("temperatures", "log_min_ps", "edit_biases", "edit_amounts")
    dtypes = dict.fromkeys(SamplingTensors.__dataclass_fields__, torch.int32) | wide
    dtypes |= dict.fromkeys(narrow, torch.float32)
    tensors = SamplingTensors(**{name: empty(64, dtype=dtype) for name, dtype in dtypes.items()})
    return plan_sample(empty(64, dtype=torch.int64), empty(64, 128256, dtype=torch.float32), tensors)


def _digests() -> Iterator[tuple[str, KernelCall]]:
    """Yields the launches that digest blocks of 2 MiB."""
    digests, words = empty(7, 2, dtype=torch.int64), empty(900, (2 << 20) // 8, dtype=torch.int64)
    for call in plan_digests(digests, words, empty(7, dtype=torch.int64), empty(63, dtype=torch.int64)):
        yield call.kernel.__name__, call
