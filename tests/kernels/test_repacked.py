"""AWQ's and GPTQ's layers on the CPU's integer kernels, on every instruction set, against numpy."""

import pytest
import torch
from paged_kernels.cpu import quantized, quantized_reference, repacked
from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.repacked import RepackedWeight
from paged_kernels.prequantized_weight import PrequantizedFormat, unpack_codes, unpack_zeros
from torch import Tensor

from tests.kernels.prequantized import Layer, random_layer
from tests.kernels.widened import may_be_widened

AWQ, GPTQ, GPTQ_V2 = PrequantizedFormat
# (format, bits, inputs, outputs, group size, groups are scattered)
LAYERS = [
    (AWQ, 4, 256, 72, 128, False),
    (AWQ, 4, 96, 40, 32, False),
    (AWQ, 4, 144, 16, 144, False),
    (GPTQ, 4, 192, 48, 64, True),
    (GPTQ, 4, 512, 32, 256, True),
    (GPTQ_V2, 4, 160, 24, 32, True),
    (GPTQ, 8, 256, 36, 128, False),
    (GPTQ_V2, 8, 96, 20, 32, True),
]
ROWS = (1, 2, 3, 5, 16, 33, 64, 97, 145)
NAMES = [f"{form.value}-{bits}-{inputs}x{outputs}-{size}" for form, bits, inputs, outputs, size, _ in LAYERS]


@pytest.fixture(params=LAYERS, ids=NAMES)
def case(request: pytest.FixtureRequest) -> tuple[Layer, RepackedWeight]:
    form, bits, num_inputs, num_outputs, group_size, shuffled = request.param
    order_seed = 7 if shuffled else None
    layer = random_layer(form, num_inputs, num_outputs, group_size, bits=bits, order_seed=order_seed)
    return layer, repacked.repack(layer.weight(group_size, shuffled=shuffled))


def in_checkpoint_order(packed: RepackedWeight, dequantized: Tensor) -> Tensor:
    if packed.input_order is None:
        return dequantized
    ordered = torch.empty_like(dequantized)
    ordered[:, packed.input_order] = dequantized
    return ordered


def assert_product(x: Tensor, layer: Layer, packed: RepackedWeight, bias: Tensor) -> None:
    """Compares with float64. The error of 16-bit inputs is measured on the largest of their group if there are few
    rows; with many, weights are rounded, too."""
    exact = layer.dequantized().double()
    expected = torch.nn.functional.linear(x.double(), exact, bias.double())
    terms = torch.nn.functional.linear(x.double().abs(), exact.abs(), bias.double().abs())
    share = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[x.dtype]
    if not may_be_widened(x) and x.dtype != torch.float32:
        terms = x.double().abs().amax(dim=1, keepdim=True) * exact.abs().sum(dim=1) + bias.double().abs()
        share = 2.0**-16
    rounding = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[x.dtype]
    actual = repacked.linear(x, packed, bias)
    assert actual.dtype == x.dtype and actual.shape == expected.shape
    assert ((actual.double() - expected).abs() <= rounding * expected.abs() + share * terms).all()


def test_codes_and_zeros_are_unpacked_as_they_were_packed(case: tuple[Layer, RepackedWeight]) -> None:
    layer, _ = case
    weight = layer.weight(1)
    assert torch.equal(unpack_codes(weight).long(), torch.from_numpy(layer.codes))
    assert torch.equal(unpack_zeros(weight).long(), torch.from_numpy(layer.zeros))


def test_weights_are_exact(case: tuple[Layer, RepackedWeight], instruction_set: str) -> None:
    layer, packed = case
    exact = layer.dequantized()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(in_checkpoint_order(packed, quantized.dequantize(packed.weight, dtype)), exact.to(dtype))
    wide = quantized_reference.dequantize(packed.weight, torch.float64)
    assert torch.equal(in_checkpoint_order(packed, wide), exact.double())


def test_linear(case: tuple[Layer, RepackedWeight], dtype: torch.dtype, instruction_set: str) -> None:
    layer, packed = case
    for num_rows in ROWS:
        x, bias = torch.randn(num_rows, len(layer.codes)).to(dtype), torch.randn(layer.codes.shape[1]).to(dtype)
        assert_product(x, layer, packed, bias)


def test_a_wide_layer_and_a_prompt_on_threads(num_threads: int, instruction_set: str) -> None:
    layer = random_layer(GPTQ, 1280, 304, 128)
    packed = repacked.repack(layer.weight(128))
    for num_rows in (3, 512):
        assert_product(torch.randn(num_rows, 1280).bfloat16(), layer, packed, torch.randn(304).bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_differences_do_not_overflow(bits: int, dtype: torch.dtype, instruction_set: str) -> None:
    """Every product of a group has the largest magnitude and the same sign, at both ends of codes and zeros."""
    layer = random_layer(GPTQ, 256, 32, 128, bits=bits)
    layer.scales[:] = 2.0**-8  # sums of equal terms are exact in float32 then, and fit float16
    for code, zero in ((0, 2**bits), (2**bits - 1, 1)):
        layer.codes[:], layer.zeros[:] = code, zero
        packed = repacked.repack(layer.weight(128))
        for num_rows in (1, 16, 64):
            x = torch.full((num_rows, 256), 100.0)
            assert_product(x.to(dtype), layer, packed, torch.zeros(32, dtype=dtype))


def test_weights_that_are_zero_add_nothing(dtype: torch.dtype, instruction_set: str) -> None:
    """They do not even add rounding errors, although their codes, which equal the zeros, are far from the middle."""
    layer = random_layer(GPTQ, 128, 16, 32)
    layer.codes[:], layer.zeros[:] = 15, 15
    packed = repacked.repack(layer.weight(32))
    for num_rows in (1, 4, 70):
        x = torch.randn(num_rows, 128).to(dtype)
        assert not repacked.linear(x, packed).count_nonzero()


@pytest.mark.parametrize("num_rows", [1, 70])
def test_without_the_extension_torch_does_the_same(
    case: tuple[Layer, RepackedWeight], num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, packed = case
    monkeypatch.setattr(quantized, "load_extension", lambda: None)
    x = torch.randn(num_rows, len(layer.codes)).to(dtype)
    expected = torch.nn.functional.linear(x, layer.dequantized().to(dtype))
    torch.testing.assert_close(repacked.linear(x, packed), expected, rtol=2e-2, atol=2e-2)


def test_zeros_that_do_not_fit_are_refused() -> None:
    packed = repacked.repack(random_layer(AWQ, 128, 32, 64).weight(64)).weight
    assert packed.zeros is not None
    x, out = torch.randn(1, 128), torch.empty(1, 32)
    native = load_extension()
    assert native is not None
    for zeros, message in (
        (packed.zeros[:1].contiguous(), "zeros differ from scales in shape"),
        (packed.zeros.float(), "element type"),
        (None, "element type"),  # scales are float32 only where there are zeros
    ):
        with pytest.raises(ValueError, match=message):
            native.quantized_matmul(out, x, packed.packed, packed.scales, zeros, None, 4, 64, 1)


def test_a_group_size_that_no_kernel_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 32"):
        repacked.repack(random_layer(AWQ, 96, 16, 48).weight(48))
