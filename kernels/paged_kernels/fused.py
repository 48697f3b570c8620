"""Row-wise pieces of a decoder layer, one pass each: compiled on the CPU where that was built, Triton on a GPU, plain
torch otherwise.

Both ways round where transformers' Llama modules round. Inference only: nothing is recorded for autograd.
"""

import torch
from torch import Tensor

from paged_kernels import fused_reference
from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.threads import num_threads

_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the rows of `x` `[num_rows, size]`, normalised by their root mean square in float32, rounded, and
    multiplied by `weight` `[size]`."""
    if x.is_cuda:
        from paged_kernels.gpu import rowwise  # Triton is installed only where GPUs are

        return rowwise.rms_norm(x, weight, eps)
    native = load_extension()
    if native is None or not _fits(x, weight):
        return fused_reference.rms_norm(x, weight, eps)
    out = _empty_like(x)
    native.rms_norm(out, x, weight, eps, num_threads())
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns `(rms_norm(residual + x), residual + x)`; the arguments, `[num_rows, size]`, stay as they are."""
    if x.is_cuda:
        from paged_kernels.gpu import rowwise

        return rowwise.add_rms_norm(x, residual, weight, eps)
    native = load_extension()
    if native is None or not _fits(x, residual, weight):
        return fused_reference.add_rms_norm(x, residual, weight, eps)
    out, new_residual = _empty_like(x), _empty_like(x)
    native.add_rms_norm(out, new_residual, x, residual, weight, eps, num_threads())
    return out, new_residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns `silu(gate) * up`, `[num_rows, size]`, for `gate_up` `[num_rows, 2 * size]` whose first half is the
    gate."""
    if gate_up.is_cuda:
        from paged_kernels.gpu import rowwise

        return rowwise.silu_mul(gate_up)
    native = load_extension()
    if native is None or not _fits(gate_up):
        return fused_reference.silu_mul(gate_up)
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype)
    native.silu_mul(out, gate_up, num_threads())
    return out


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates `query` `[num_tokens, num_heads, head_dim]` and `key` `[num_tokens, num_kv_heads, head_dim]` in place.

    Element d turns with element d + head_dim / 2 ("half rotation", as in transformers). `cos` and `sin` are float32,
    `[num_tokens, head_dim / 2]`, or `[num_tokens, head_dim]` with equal halves.
    """
    native = load_extension()
    if native is None or not _fits(query, key):
        fused_reference.rotary(query, key, cos, sin)
        return
    native.rotary(query, cos, sin, num_threads())
    native.rotary(key, cos, sin, num_threads())


def _empty_like(x: Tensor) -> Tensor:
    """Returns a contiguous tensor like `x`, in half the time of `torch.empty`, which several calls a layer would
    feel."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fits(*tensors: Tensor) -> bool:
    """Returns whether the compiled kernels take these: on the CPU, one dtype that they know, a contiguous last axis."""
    dtype = tensors[0].dtype
    for tensor in tensors:  # a loop: a generator would take longer than the checks
        if tensor.dtype is not dtype or not tensor.is_cpu or tensor.stride(-1) != 1:
            return False
    return dtype in _NATIVE_DTYPES
