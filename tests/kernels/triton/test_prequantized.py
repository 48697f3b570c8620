"""Matrix products of 4 and 8 bits against weights that were dequantised by hand, in both published layouts."""

import pytest
import torch
from paged_kernels.prequantized_weight import PrequantizedFormat, PrequantizedWeight
from paged_kernels.quantized_weight import Bits
from paged_kernels.triton_prequantized import prequantized_matmul
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an int32 holds column AWQ_ORDER[i] of its eight


def pack_columns(codes: Tensor, bits: Bits, order: tuple[int, ...] | None = None) -> Tensor:
    """`[rows, columns]` of 0 to 2^bits - 1 to int32 `[rows, columns / (32 / bits)]`."""
    per_word = 32 // bits
    words = codes.view(codes.shape[0], -1, per_word)[:, :, list(order or range(per_word))].long()
    packed = (words << (torch.arange(per_word) * bits)).sum(-1)
    return packed.to(torch.int32)  # wraps around, as the format does


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
    """A random layer and its dequantised weights, `[num_inputs, num_outputs]` float32."""
    codes = torch.randint(0, 2**bits, (num_inputs, num_outputs))
    num_groups = num_inputs // group_size
    zeros = torch.randint(1, 2**bits + int(form is PrequantizedFormat.GPTQ), (num_groups, num_outputs))
    scales = ((torch.rand(num_groups, num_outputs) * 0.02 + 0.001) / 2 ** (bits - 4)).to(dtype)
    groups = torch.arange(num_inputs) // group_size
    if shuffled:
        groups = groups[torch.randperm(num_inputs)]
    exact = (codes - zeros[groups]).float() * scales.float()[groups]
    if form is PrequantizedFormat.AWQ:
        packed, packed_zeros = pack_columns(codes, bits, AWQ_ORDER), pack_columns(zeros, bits, AWQ_ORDER)
    else:
        packed = pack_columns(codes.T.contiguous(), bits).T.contiguous()
        packed_zeros = pack_columns(zeros - int(form is PrequantizedFormat.GPTQ), bits)
    group_of_input = groups.to(torch.int32) if shuffled else None
    return PrequantizedWeight(form, packed, packed_zeros, scales, group_size, group_of_input, bits), exact


def check(x: Tensor, weight: PrequantizedWeight, exact: Tensor, bias: Tensor | None = None) -> None:
    actual = prequantized_matmul(x, weight, bias)
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
    check(torch.randn(num_rows, 352), weight, exact)


@pytest.mark.parametrize("num_rows", [5, 300])
def test_inputs_in_shuffled_groups(num_rows: int) -> None:
    weight, exact = make_weight(PrequantizedFormat.GPTQ, 192, 64, 64, torch.float16, shuffled=True)
    check(torch.randn(num_rows, 192), weight, exact)


def test_inputs_are_split_for_stack() -> None:
    """17 tiles of inputs over 4 programs."""
    weight, exact = make_weight(PrequantizedFormat.AWQ, 1088, 16, 64, torch.float16)
    check(torch.randn(2, 1088), weight, exact)


def test_refuses_what_does_not_fit() -> None:
    weight, _ = make_weight(PrequantizedFormat.AWQ, 64, 16, 64, torch.float16)
    with pytest.raises(ValueError, match="does not fit"):
        prequantized_matmul(torch.randn(2, 65), weight)
