"""FP8 e4m3: every code, the rounding of every kind of number, and attention over a quantised pool."""

import pytest
import torch
import triton
import triton.language as tl
from paged_kernels.kv_scales import KVScales
from paged_kernels.reference import ReferenceBackend
from paged_kernels.triton_attention import TritonBackend
from paged_kernels.triton_device.fp8 import decode_e4m3, encode_e4m3
from torch import Tensor

from tests.kernels.batch import LAYER, NUM_LAYERS, Heads, Lengths, make_batch


@triton.jit  # type: ignore[untyped-decorator]
def convert_kernel(output, source, count, ENCODE: tl.constexpr):  # type: ignore[no-untyped-def]
    entries = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    values = tl.load(source + entries, mask=entries < count, other=0)
    converted = encode_e4m3(values) if ENCODE else decode_e4m3(values)
    tl.store(output + entries, converted, mask=entries < count)


def encode(x: Tensor) -> Tensor:
    codes = torch.empty(x.shape, dtype=torch.uint8)
    convert_kernel[(-(-x.numel() // 1024),)](codes, x, x.numel(), ENCODE=True)
    return codes


def test_decodes_every_code() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = torch.empty(256)
    convert_kernel[(1,)](values, codes, 256, ENCODE=False)
    expected = codes.view(torch.float8_e4m3fn).float()
    numbers = ~expected.isnan()
    assert torch.equal(values[numbers], expected[numbers])
    assert values[~numbers].tolist() == [480.0, -480.0]


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
