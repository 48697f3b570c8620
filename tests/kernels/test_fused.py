"""The fused row-wise operations against plain torch, on every instruction set."""

import pytest
import torch
from paged_kernels import fused, fused_reference

from tests.kernels.rowwise import assert_close

SHAPES = [(1, 8), (3, 100), (40, 896), (100, 1031)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, instruction_set: str, num_threads: int) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    expected = fused_reference.rms_norm(x.double() if dtype == torch.float32 else x, weight, 1e-5)
    assert_close(fused.rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, instruction_set: str, num_threads: int) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    before = residual.clone()
    normed, new_residual = fused.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_residual = fused_reference.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(new_residual, expected_residual) and torch.equal(residual, before)
    assert_close(normed, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype, instruction_set: str, num_threads: int) -> None:
    gate_up = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    expected = fused_reference.silu_mul(gate_up.double() if dtype == torch.float32 else gate_up)
    assert_close(fused.silu_mul(gate_up), expected)


def test_silu_mul_at_the_ends(instruction_set: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, -60.0, 0.0, 60.0, 88.5, 200.0, 1e30, float("nan")])
    gate_up = torch.stack((gate, torch.ones_like(gate)), dim=-1)
    expected = fused_reference.silu_mul(gate_up)
    torch.testing.assert_close(fused.silu_mul(gate_up), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("full_width", [False, True])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_rotary(num_tokens: int, head_dim: int, full_width: bool, dtype: torch.dtype, instruction_set: str) -> None:
    projected = torch.randn(num_tokens, 9, head_dim).to(dtype)  # 6 query, 2 key and 1 value heads
    angles = torch.rand(num_tokens, head_dim // 2) * 100
    if full_width:
        angles = torch.cat((angles, angles), dim=-1)
    expected = projected.clone()
    fused_reference.rotary(expected[:, :6], expected[:, 6:8], angles.cos(), angles.sin())
    fused.rotary(projected[:, :6], projected[:, 6:8], angles.cos(), angles.sin())
    assert_close(projected, expected)
    assert torch.equal(projected[:, 8], expected[:, 8])


def test_other_dtypes_take_the_torch_path() -> None:
    x, weight = torch.randn(3, 10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    assert torch.equal(fused.rms_norm(x, weight, 1e-5), fused_reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(fused.silu_mul(x), fused_reference.silu_mul(x))


def test_strided_rows() -> None:
    wide, weight = torch.randn(4, 100), torch.randn(64)
    assert_close(fused.rms_norm(wide[:, 10:74], weight, 1e-5), fused_reference.rms_norm(wide[:, 10:74], weight, 1e-5))
    assert_close(fused.rms_norm(wide.T[:64].T, weight, 1e-5), fused_reference.rms_norm(wide[:, :64], weight, 1e-5))


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="weight"):
        fused.rms_norm(torch.randn(2, 8), torch.randn(4), 1e-5)
    with pytest.raises(ValueError, match="one row per token"):
        fused.rotary(torch.randn(2, 1, 8), torch.randn(2, 1, 8), torch.randn(1, 4), torch.randn(1, 4))
