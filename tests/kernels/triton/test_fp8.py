"""FP8 e4m3: every code, the rounding of every kind of number, and attention over a quantised pool."""

import pytest
import torch
import triton
import triton.language as tl
from paged_kernels.gpu.attention import TritonBackend
from paged_kernels.gpu.device.fp8 import decode_e4m3, decode_pairs, encode_e4m3, fit_to_codes
from paged_kernels.kv_scales import KVScales
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from tests.kernels.batch import LAYER, NUM_LAYERS, Heads, Lengths, make_batch


@triton.jit
def encode_kernel(output, source, count):  # type: ignore[no-untyped-def]
    entries = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    values = tl.load(source + entries, mask=entries < count, other=0)
    tl.store(output + entries, encode_e4m3(values), mask=entries < count)


@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(output, codes, CONVERT_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    entries = tl.arange(0, 256)
    tl.store(output + entries, decode_e4m3(tl.load(codes + entries), CONVERT_FP8))


@triton.jit
def decode_pairs_kernel(output, pairs):  # type: ignore[no-untyped-def]
    entries = tl.arange(0, 65536)
    low, high = decode_pairs(tl.load(pairs + entries), False)
    tl.store(output + 2 * entries, low)
    tl.store(output + 2 * entries + 1, high)


@triton.jit
def fit_kernel(output, factors, source):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, 64), tl.arange(0, 128)
    entries = rows[:, None] * 128 + columns[None, :]
    fitted, of_rows = fit_to_codes(tl.load(source + entries))
    tl.store(output + entries, fitted)
    tl.store(factors + rows[:, None], of_rows)


def encode(x: Tensor) -> Tensor:
    codes = torch.empty(x.shape, dtype=torch.uint8)
    encode_kernel[(-(-x.numel() // 1024),)](codes, x, x.numel())
    return codes


@pytest.mark.parametrize("convert", [False, True])
def test_decodes_every_code(convert: bool) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = torch.empty(256, dtype=torch.float16)
    decode_kernel[(1,)](values, codes, CONVERT_FP8=convert)
    expected = codes.view(torch.float8_e4m3fn).half()
    numbers = ~expected.isnan()
    assert torch.equal(values[numbers], expected[numbers])
    assert convert or values[~numbers].tolist() == [480.0, -480.0]


def test_decodes_every_pair() -> None:
    pairs = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = torch.empty(65536, 2, dtype=torch.float16)
    decode_pairs_kernel[(1,)](values, pairs)
    expected = pairs.view(torch.float8_e4m3fn).view(65536, 2).half()
    numbers = ~expected.isnan()
    assert torch.equal(values[numbers], expected[numbers])


def test_fits_queries_of_any_size() -> None:
    drawn = torch.randn(64, 128) * torch.exp2(torch.randint(-8, 1, (64, 128)))
    source = (drawn * torch.exp2(torch.linspace(-90, 120, 64))[:, None]).bfloat16()
    source[5] = 0.0
    fitted, factors = torch.empty(64, 128, dtype=torch.float16), torch.empty(64)
    fit_kernel[(1,)](fitted, factors, source)
    error = (fitted.double() * factors.double()[:, None] - source.double()).abs()
    assert (error <= 2.0**-25 * source.double().abs().amax(1, keepdim=True)).all()
    exact = source.abs() >= 2.0**-16 * source.abs().amax(1, keepdim=True)
    assert not error[exact].any()


def test_encodes_like_torch() -> None:
    exact = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    exact = exact[~exact.isnan()].sort().values
    middles = (exact[1:] + exact[:-1]) / 2
    around = torch.cat((exact, middles, torch.nextafter(middles, exact[1:]), torch.nextafter(middles, exact[:-1])))
    drawn = torch.randn(20_000) * torch.exp2(torch.randint(-12, 10, (20_000,)))
    every_bfloat16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat((around, drawn, every_bfloat16[~every_bfloat16.isnan()])).clamp(-448, 448)
    assert torch.equal(encode(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_encoding_saturates() -> None:
    x = torch.tensor([449.0, 1e30, float("inf"), float("nan"), -1e30, float("-inf")])
    assert encode(x).view(torch.float8_e4m3fn).float().tolist() == [448.0] * 4 + [-448.0] * 2


@pytest.mark.parametrize("lengths", [((70, 1), (3, 1)), ((20, 1), (40, 30))], ids=["decode", "mixed"])
def test_attends_over_a_quantised_pool(lengths: Lengths, dtype: torch.dtype) -> None:
    batch = make_batch(Heads(6, 2, 64), dtype, lengths)
    shape = (NUM_LAYERS, 2)
    kv_scales = KVScales(torch.rand(shape) * 0.02 + 0.005, torch.rand(shape) * 0.02 + 0.005)
    factors = torch.stack(kv_scales.of_layer(LAYER), dim=-1)[None, :, None, :, None, None]
    quantised = (batch.pool.float().nan_to_num() / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
    actual = TritonBackend(kv_scales).attend(batch.query, quantised, LAYER, batch.metadata, scale=0.125)
    exact_pool = quantised.double() * factors.double()
    expected = ReferenceBackend().attend(batch.query.double(), exact_pool, LAYER, batch.metadata, scale=0.125)
    rtol, atol = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (2**-7, 5e-3), torch.float16: (2**-10, 1e-3)}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)
