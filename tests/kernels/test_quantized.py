"""Packing, products and the way back of 8- and 4-bit weights against plain torch, on every instruction set."""

from dataclasses import replace

import pytest
import torch
from paged_kernels.cpu import quantized, quantized_reference
from paged_kernels.cpu.quantized_weight import Bits, QuantizedWeight
from paged_kernels.cpu.threads import threads_kept, use_threads
from torch import Tensor

from tests.kernels.quantized import to_nearest
from tests.kernels.widened import may_be_widened

BITS: tuple[Bits, ...] = (8, 4)
# Outputs and inputs: whole panels and groups, tails of both, less than one of either, several groups and a tail.
SHAPES = [(64, 256), (33, 144), (3, 8), (1, 1), (16, 64), (100, 700), (48, 896)]
ROWS = [1, 2, 3, 4, 5, 16, 17, 33, 63, 64, 97, 145]


def assert_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
    """Compares with float64. The error is measured on the scale of what was summed: |x| |w|."""
    wide = quantized_reference.dequantize(weight, torch.float64)
    terms = torch.nn.functional.linear(x.double().abs(), wide.abs(), None if bias is None else bias.double().abs())
    expected = torch.nn.functional.linear(x.double(), wide, None if bias is None else bias.double())
    rounding = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[x.dtype]
    # Widened weights of a large product are rounded once more, and 16-bit inputs count against their group's largest.
    share = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[x.dtype]
    if not may_be_widened(x) and x.dtype != torch.float32:
        largest = x.double().abs().amax(dim=1, keepdim=True).expand_as(x)
        terms = torch.nn.functional.linear(largest, wide.abs())
        share = 2.0**-16
    actual = quantized.linear(x, weight, bias)
    assert actual.dtype == x.dtype and actual.shape == expected.shape
    allowed = rounding * expected.abs() + share * terms + 1e-30
    assert ((actual.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_bytes_are_those_of_the_reference(shape: tuple[int, int], bits: Bits, dtype: torch.dtype) -> None:
    rows = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(dtype)
    weight = to_nearest(rows, bits)
    expected = quantized.empty_weight(*shape, bits)
    quantized_reference.pack_rows(expected, rows, 0)
    assert torch.equal(weight.packed, expected.packed) and torch.equal(weight.scales, expected.scales)


@pytest.mark.parametrize("bits", BITS)
def test_parts_that_share_a_panel_are_packed_one_by_one(bits: Bits) -> None:
    rows = torch.randn(50, 200)
    weight = quantized.empty_weight(50, 200, bits)
    for begin, end in ((24, 50), (0, 5), (5, 24)):
        quantized.pack_rows(weight, rows[begin:end], begin)
    whole = to_nearest(rows, bits)
    assert torch.equal(weight.packed, whole.packed) and torch.equal(weight.scales, whole.scales)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize(
    shape: tuple[int, int], bits: Bits, dtype: torch.dtype, instruction_set: str, num_threads: int
) -> None:
    weight = to_nearest(torch.randn(shape), bits)
    assert torch.equal(quantized.dequantize(weight, dtype), quantized_reference.dequantize(weight, dtype))


@pytest.mark.parametrize(("bits", "steps"), [(8, 0.76), (4, 1.02)])  # the scale's own rounding moves the ends
def test_no_weight_moves_by_more_than_a_step_of_its_group(bits: Bits, steps: float) -> None:
    rows = torch.randn(32, 512)
    moved = (quantized_reference.dequantize(to_nearest(rows, bits), torch.float32) - rows).abs().view(32, -1)
    scales = to_nearest(rows, bits).scales.float().abs().transpose(1, 2).reshape(32, -1)
    step = scales.repeat_interleave(quantized.GROUP_SIZES[bits], dim=1)
    assert (moved <= steps * step).all()
    assert moved.mean() < 0.3 * step.mean()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(shape: tuple[int, int], bits: Bits, dtype: torch.dtype, instruction_set: str) -> None:
    weight = to_nearest(torch.randn(shape), bits)
    for num_rows in ROWS:
        assert_product(torch.randn(num_rows, shape[1]).to(dtype), weight, torch.randn(shape[0]).to(dtype))


@pytest.mark.parametrize("bits", BITS)
def test_a_wide_layer_on_threads_and_from_a_strided_input(
    bits: Bits, dtype: torch.dtype, instruction_set: str, num_threads: int
) -> None:
    weight = to_nearest(torch.randn(2000, 320), bits)
    assert_product(torch.randn(3, 640).to(dtype)[:, 100:420], weight)
    assert quantized.linear(torch.empty(0, 320, dtype=dtype), weight).shape == (0, 2000)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_rows", [512, 700])
@pytest.mark.parametrize("shape", [(300, 1300), (129, 512), (16, 64)])
def test_prompts_and_layers_that_are_cut_in_blocks(
    shape: tuple[int, int], num_rows: int, bits: Bits, num_threads: int, instruction_set: str
) -> None:
    weight = to_nearest(torch.randn(shape), bits)
    assert_product(torch.randn(num_rows, shape[1]).bfloat16(), weight, torch.randn(shape[0]).bfloat16())


@pytest.mark.parametrize("bits", BITS)
def test_extreme_integers_do_not_overflow(bits: Bits, dtype: torch.dtype, instruction_set: str) -> None:
    """Every product of a group has the largest magnitude and the same sign."""
    for sign in (1.0, -1.0):
        weight = to_nearest(torch.full((16, 256), sign), bits)
        for num_rows in (1, 16):
            assert_product(torch.full((num_rows, 256), 100.0).to(dtype), weight)


@pytest.mark.parametrize("bits", BITS)
def test_outliers_and_zeros_do_not_spoil_other_groups(bits: Bits, dtype: torch.dtype, instruction_set: str) -> None:
    rows = torch.randn(32, 512)
    rows[:, :128] = 0.0  # groups without a scale
    rows[5, 200] = 300.0
    weight = to_nearest(rows, bits)
    for num_rows in (1, 4, 20):
        x = torch.randn(num_rows, 512)
        x[:, 300] = 5_000.0
        x[:, 384:] = 0.0
        x = x.to(dtype)
        assert_product(x, weight)
        quiet = x.clone()
        quiet[:, 256:] = 0.0  # without the outlier's group the rest is as exact as if it had never been there
        only = replace(weight, packed=weight.packed, scales=weight.scales.clone())
        only.scales[:, 256 // weight.group_size :] = 0.0
        torch.testing.assert_close(quantized.linear(x, only), quantized.linear(quiet, only), rtol=0, atol=0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_rows", [1, 3, 18, 70, 145])
def test_a_value_that_is_not_finite_is_not_hidden(
    num_rows: int, bits: Bits, dtype: torch.dtype, instruction_set: str
) -> None:
    weight = to_nearest(torch.randn(20, 200).abs() + 0.1, bits)
    x = torch.randn(num_rows, 200).to(dtype)
    clean = quantized.linear(x, weight)
    for value in (float("nan"), float("inf"), float("-inf")):
        x[0, 70] = value
        spoilt = quantized.linear(x, weight)
        assert not spoilt[0].isfinite().any()
        assert torch.equal(spoilt[1:], clean[1:])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("place", [0, 5, -1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_not_hidden(value: float, place: int, bits: Bits, instruction_set: str) -> None:
    """A damaged checkpoint would otherwise give wrong tokens, and no error."""
    rows = torch.randn(16, 256)
    group = slice(128, 128 + quantized.GROUP_SIZES[bits])
    rows[3, group][place] = value
    weight = to_nearest(rows, bits)
    found = quantized.dequantize(weight, torch.float32).isfinite()
    assert not found[3, group].any()
    found[3, group] = True
    assert found.all()
    assert not quantized.linear(torch.randn(2, 256).bfloat16(), weight)[:, 3].isfinite().any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-35, 1e30])
def test_the_ends_of_the_range(size: float, bits: Bits, instruction_set: str) -> None:
    weight = to_nearest(torch.randn(16, 128) * size, bits)
    assert quantized.dequantize(weight, torch.float32).isfinite().all()
    plain = to_nearest(torch.randn(16, 128), bits)
    x = (torch.randn(4, 128) * size).bfloat16()
    assert quantized.linear(x, plain).isfinite().all()
    assert quantized.linear(torch.randn(4, 128).bfloat16(), weight).isfinite().all()


def test_a_row_is_the_same_on_any_number_of_threads(instruction_set: str) -> None:
    weight = to_nearest(torch.randn(3000, 256), 8)
    x = torch.randn(2, 256).bfloat16()
    with threads_kept():
        use_threads(1)
        one = quantized.linear(x, weight)
        use_threads(2)
        assert torch.equal(quantized.linear(x, weight), one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 16}, "group_size must be 32, 64 or 128"),
        ({"group_size": 64}, "another number of groups"),
        ({"num_inputs": 600}, "another number of groups"),
        ({"num_outputs": 80}, "a panel for every 16 outputs"),
        ({"bits": 3}, "bits must be 8 or 4"),
        ({"bits": 4}, "another number of bytes"),
        ({"packed": torch.zeros(4, 256 * 16, dtype=torch.int8)}, "packed is not uint8"),
        ({"scales": torch.zeros(4, 2, 16)}, "element type"),
    ],
)
def test_weights_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    weight = replace(to_nearest(torch.randn(64, 256), 8), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        quantized.linear(torch.randn(1, weight.num_inputs), weight)


def test_inputs_and_bias_that_do_not_fit_are_refused() -> None:
    weight = to_nearest(torch.randn(64, 256), 8)
    with pytest.raises(ValueError, match="another number of groups"):
        quantized.linear(torch.randn(1, 500), weight)
    with pytest.raises(ValueError, match="bias has another length"):
        quantized.linear(torch.randn(1, 256), weight, torch.randn(60))
    with pytest.raises(ValueError, match="the rows do not fit"):
        quantized.pack_rows(weight, torch.randn(10, 256), 60)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_rows", [1, 70])
def test_without_the_extension_torch_does_the_same(
    bits: Bits, num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(1000, 600)
    compiled = to_nearest(rows, bits)
    monkeypatch.setattr(quantized, "load_extension", lambda: None)
    monkeypatch.setattr(quantized, "_WIDENED_BYTES", 600 * 4 * 100)  # several pieces
    weight = to_nearest(rows, bits)
    assert torch.equal(weight.packed, compiled.packed) and torch.equal(weight.scales, compiled.scales)
    x, bias = torch.randn(num_rows, 600).to(dtype), torch.randn(1000).to(dtype)
    expected = torch.nn.functional.linear(x, quantized_reference.dequantize(weight, dtype), bias)
    torch.testing.assert_close(quantized.linear(x, weight, bias), expected, rtol=2e-2, atol=1e-2 * 600**0.5)
