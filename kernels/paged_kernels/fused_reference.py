"""What `fused.py` computes, in plain torch: its fallback and its oracle. See there for shapes."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    new_residual = residual + x
    return rms_norm(new_residual, weight, eps), new_residual


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = query.shape[-1] // 2
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    for x in (query, key):
        low, high = x[..., :half].to(cos.dtype), x[..., half:].to(cos.dtype)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        x.copy_(turned)
