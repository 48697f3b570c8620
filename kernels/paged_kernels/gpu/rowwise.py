"""`fused.py`'s row-wise operations on a GPU. See there for shapes."""

import torch
from torch import Tensor

from paged_kernels.gpu.device.rowwise import rms_norm_kernel, silu_mul_kernel
from paged_kernels.gpu.launch import KernelCall, ceil_divide, launch, next_power_of_two

_TILE_ELEMENTS = 4096


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch([plan_rms_norm(output, None, x, None, weight, eps)])
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch([plan_rms_norm(output, new_residual, x, residual, weight, eps)])
    return output, new_residual


def silu_mul(gate_up: Tensor) -> Tensor:
    output = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    launch([plan_silu_mul(output, gate_up)])
    return output


def plan_rms_norm(
    output: Tensor, new_residual: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> KernelCall:
    num_rows, size = x.shape
    if weight.shape != (size,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"weight {tuple(weight.shape)} or residual does not fit rows {tuple(x.shape)}")
    columns = next_power_of_two(size)
    rows = max(1, min(_TILE_ELEMENTS // columns, 32))
    return KernelCall(
        rms_norm_kernel,
        (ceil_divide(num_rows, rows),),
        {
            "output": output,
            "new_residual": new_residual,
            "x": x,
            "residual": residual,
            "weight": weight,
            "num_rows": num_rows,
            "size": size,
            "eps": eps,
            "x_stride": x.stride(0),
            "residual_stride": 0 if residual is None else residual.stride(0),
        },
        {"ROWS": rows, "COLUMNS": columns, "ADD": residual is not None},
        num_warps=max(4, min(16, columns // 512)),
    )


def plan_silu_mul(output: Tensor, gate_up: Tensor) -> KernelCall:
    size = output.shape[1]
    columns = min(2048, next_power_of_two(size))
    return KernelCall(
        silu_mul_kernel,
        (gate_up.shape[0], ceil_divide(size, columns)),
        {"output": output, "gate_up": gate_up, "size": size, "row_stride": gate_up.stride(0)},
        {"COLUMNS": columns},
    )
