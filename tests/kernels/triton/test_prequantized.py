"""Matrix products of 4 and 8 bits against weights that were dequantised by hand, in both published layouts."""

from dataclasses import replace

import pytest
import torch
from paged_kernels.cpu.quantized_weight import Bits
from paged_kernels.gpu import prequantized
from paged_kernels.gpu.launch import KernelCall
from paged_kernels.gpu.prequantized import prequantized_matmul
from paged_kernels.prequantized_weight import PrequantizedFormat, PrequantizedWeight
from torch import Tensor

from kvrelay.engine.layers.prequantized_linear import TritonProduct
from tests.kernels.prequantized import random_layer


def make_weight(
    form: PrequantizedFormat,
    num_inputs: int,
    num_outputs: int,
    group_size: int,
    dtype: torch.dtype,
    *,
    bits: Bits = 4,
    shuffled: bool = False,
) -> tuple[PrequantizedWeight, Tensor]:
    """Makes a layer with scales of `dtype`, and its dequantised weights, `[num_inputs, num_outputs]` float32."""
    seed = 1 if shuffled else None
    layer = random_layer(form, num_inputs, num_outputs, group_size, bits=bits, order_seed=seed, spread=0.05)
    weight = layer.weight(group_size, shuffled=shuffled)
    weight = replace(weight, scales=weight.scales.to(dtype))
    steps = torch.from_numpy(layer.codes - layer.zeros[layer.group_of_input])
    return weight, steps.float() * weight.scales[torch.from_numpy(layer.group_of_input)].float()


def check(x: Tensor, weight: PrequantizedWeight, exact: Tensor, bias: Tensor | None = None) -> None:
    actual = TritonProduct(weight)(x, bias)
    assert actual.dtype == x.dtype
    # Weights round to the dtype of the products, and so does the result.
    expected = x.double() @ exact.to(x.dtype).double() + (0.0 if bias is None else bias.double())
    rtol = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-8}[x.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("num_rows", [1, 17, 70, 300])
@pytest.mark.parametrize("form", list(PrequantizedFormat))
def test_agrees_with_dequantised_weights(form: PrequantizedFormat, num_rows: int, dtype: torch.dtype) -> None:
    scale_dtype = torch.float16 if dtype == torch.float32 else dtype
    weight, exact = make_weight(form, 256, 80, 128, scale_dtype)
    check(torch.randn(num_rows, 256).to(dtype), weight, exact, torch.randn(80).to(dtype))


@pytest.mark.parametrize(("num_inputs", "group_size"), [(352, 32), (320, 64), (320, 320), (352, 352)])
@pytest.mark.parametrize("num_rows", [3, 257])
@pytest.mark.parametrize("form", [PrequantizedFormat.AWQ, PrequantizedFormat.GPTQ])
def test_any_group_size(form: PrequantizedFormat, num_rows: int, num_inputs: int, group_size: int) -> None:
    weight, exact = make_weight(form, num_inputs, 72, group_size, torch.float16)
    check(torch.randn(num_rows, 640).to(torch.float16)[:, :num_inputs], weight, exact)


@pytest.mark.parametrize("num_rows", [1, 70, 300])
@pytest.mark.parametrize("form", [PrequantizedFormat.GPTQ, PrequantizedFormat.GPTQ_V2])
def test_8_bits(form: PrequantizedFormat, num_rows: int) -> None:
    weight, exact = make_weight(form, 256, 76, 128, torch.float16, bits=8)
    check(torch.randn(num_rows, 256).to(torch.float16), weight, exact)
    weight, exact = make_weight(form, 352, 76, 32, torch.float16, bits=8, shuffled=True)
    check(torch.randn(num_rows, 352).half(), weight, exact)


@pytest.mark.parametrize("num_rows", [5, 300])
def test_inputs_in_shuffled_groups(num_rows: int) -> None:
    weight, exact = make_weight(PrequantizedFormat.GPTQ, 192, 64, 64, torch.float16, shuffled=True)
    check(torch.randn(num_rows, 192).half(), weight, exact)


@pytest.mark.parametrize("num_rows", [2, 100])
def test_inputs_are_split(num_rows: int) -> None:
    """17 groups of inputs over several programs, whose sums are added."""
    weight, exact = make_weight(PrequantizedFormat.AWQ, 1088, 16, 64, torch.float16)
    check(torch.randn(num_rows, 1088).half(), weight, exact, torch.randn(16).half())


@pytest.mark.parametrize("num_rows", [32, 256, 512])
@pytest.mark.parametrize("form", list(PrequantizedFormat))
def test_weights_are_rounded_once(form: PrequantizedFormat, num_rows: int) -> None:
    """Rows with a single 1 return them bit for bit."""
    weight, exact = make_weight(form, 512, 72, 128, torch.float16)
    rows = torch.eye(512, dtype=torch.bfloat16)[-num_rows:]
    assert torch.equal(prequantized_matmul(rows, weight), exact[-num_rows:].bfloat16())


def test_torch_multiplies_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would round it to TF32 on sm_100."""
    launched: list[KernelCall] = []
    monkeypatch.setattr(prequantized, "launch", launched.extend)
    weight, _ = make_weight(PrequantizedFormat.AWQ, 64, 64, 64, torch.float16)
    prequantized_matmul(torch.randn(1, 64), weight)
    assert [call.kernel.__name__ for call in launched] == ["dequantize_kernel"]


def test_refuses_what_does_not_fit() -> None:
    weight, _ = make_weight(PrequantizedFormat.AWQ, 64, 16, 64, torch.float16)
    with pytest.raises(ValueError, match="does not fit"):
        prequantized_matmul(torch.randn(2, 65), weight)
