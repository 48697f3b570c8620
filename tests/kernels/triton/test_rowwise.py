"""RMSNorm, residual sums and SiLU-mul against plain torch."""

import pytest
import torch
from paged_kernels import fused_reference
from paged_kernels.gpu import rowwise

from tests.kernels.rowwise import assert_close

SHAPES = [(1, 64), (3, 100), (40, 896), (2, 1031), (2, 5120)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    expected = fused_reference.rms_norm(x.double() if dtype == torch.float32 else x, weight, 1e-5)
    assert_close(rowwise.rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    before = residual.clone()
    normed, new_residual = rowwise.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_residual = fused_reference.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(new_residual, expected_residual) and torch.equal(residual, before)
    assert_close(normed, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    expected = fused_reference.silu_mul(gate_up.double() if dtype == torch.float32 else gate_up)
    assert_close(rowwise.silu_mul(gate_up), expected)


def test_silu_mul_at_the_ends() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, -60.0, 0.0, 60.0, 88.5, 200.0, 1e30, float("nan")])
    gate_up = torch.stack((gate, torch.ones_like(gate)), dim=-1)
    expected = fused_reference.silu_mul(gate_up)
    torch.testing.assert_close(rowwise.silu_mul(gate_up), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_strided_rows() -> None:
    wide, weight = torch.randn(4, 100), torch.randn(64)
    expected = fused_reference.rms_norm(wide[:, 10:74], weight, 1e-5)
    assert_close(rowwise.rms_norm(wide[:, 10:74], weight, 1e-5), expected)


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="weight"):
        rowwise.rms_norm(torch.randn(2, 8), torch.randn(4), 1e-5)
