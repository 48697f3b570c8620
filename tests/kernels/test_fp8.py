"""An FP8 pool on the CPU: every number is encoded as torch does, every code is read exactly, and attention is that over
the dequantised pool in float64; on every instruction set."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from paged_kernels.base import AttentionBackend
from paged_kernels.cpu.native import NativeBackend
from paged_kernels.kv_scales import FP8, KVScales
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from tests.kernels.batch import LAYER, NUM_LAYERS, TOLERANCE, Batch, Heads, Lengths, make_batch

BLOCK_SIZE = 16
SCALES = (1.0, 0.5, 0.37, 3.0)
MIXED: Lengths = ((20, 1), (0, 33), (64, 16), (300, 1), (0, 1), (5, 7))
LONG: Lengths = ((511, 1), (1500, 1), (1500, 6))
HEADS = [
    *(Heads(2, 2, 64), Heads(14, 2, 64), Heads(3, 1, 24), Heads(8, 2, 80), Heads(4, 2, 96), Heads(8, 1, 96)),
    *(Heads(4, 2, 128), Heads(8, 1, 128, block_size=32)),
]


def every_number(dtype: torch.dtype) -> Tensor:
    """`[num_tokens, 1, 64]`: all bfloat16 or float16 values; of float32 those of both, and what lies between codes."""
    if dtype is not torch.float32:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 1, 64)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8).float()
    exact = codes[~codes.isnan()].sort().values
    middles = (exact[1:] + exact[:-1]) / 2
    around = [exact, middles, torch.nextafter(middles, exact[1:]), torch.nextafter(middles, exact[:-1])]
    narrow = [every_number(dtype).float().flatten() for dtype in (torch.bfloat16, torch.float16)]
    numbers = torch.cat([*around, *narrow])
    return numbers[: len(numbers) // 64 * 64].view(-1, 1, 64)


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> type[NativeBackend] | type[ReferenceBackend]:
    return NativeBackend if request.param == "native" else ReferenceBackend


def test_encodes_every_number_as_torch_does(
    backend: type[NativeBackend] | type[ReferenceBackend], dtype: torch.dtype, instruction_set: str
) -> None:
    """K of head h by SCALES[h], V by the next one."""
    numbers = every_number(dtype)
    rows = numbers.expand(-1, len(SCALES), -1)
    key_scale, value_scale = torch.tensor(SCALES), torch.tensor(SCALES).roll(-1)
    pool = torch.zeros(-(-len(rows) // BLOCK_SIZE), len(SCALES), 1, 2, BLOCK_SIZE, 64, dtype=FP8)
    scales = KVScales(key_scale[None], value_scale[None])
    backend(scales).write_kv(rows, rows, pool, 0, torch.arange(len(rows)))
    codes = pool.view(torch.uint8).permute(3, 0, 4, 1, 2, 5).flatten(1, 2)[:, : len(rows), :, 0]  # [2, tokens, 4, 64]
    for stored, scale in zip(codes, (key_scale, value_scale), strict=True):
        scaled = rows.float() * (1.0 / scale)[:, None]
        expected = scaled.clamp(-448, 448).to(FP8).view(torch.uint8)
        number = ~scaled.isnan()
        assert torch.equal(stored[number], expected[number])
        assert set(stored[~number].tolist()) == {0x7E, 0xFE}, "NaN is the largest code"


@pytest.mark.parametrize("num_heads", [1, 8])
def test_reads_every_code_exactly(
    num_heads: int,
    backend: type[NativeBackend] | type[ReferenceBackend],
    dtype: torch.dtype,
    instruction_set: str,
) -> None:
    """Attention over one token is its V."""
    pool = torch.zeros(4, 1, 1, 2, BLOCK_SIZE, 64, dtype=torch.uint8)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 64)
    pool[:, 0, 0, 1, 0] = codes
    batch = make_batch(Heads(num_heads, 1, 64), dtype, ((0, 1),) * 4)
    metadata = replace(batch.metadata, block_tables=torch.arange(4, dtype=torch.int32)[:, None])
    scales = KVScales(torch.ones(1, 1), torch.full((1, 1), 0.25))
    values = backend(scales).attend(batch.query, pool.view(FP8), 0, metadata, scale=0.125)
    expected = codes.view(FP8).float() * 0.25
    number = ~expected.isnan()
    for head in range(num_heads):
        assert torch.equal(values[:, head].float()[number], expected[number])


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedBatch:
    """A `batch` with an FP8 pool, and what attention over the dequantised pool is in float64."""

    batch: Batch
    scales: KVScales
    expected: Tensor

    def check(self, backend: AttentionBackend) -> None:
        actual = self.batch.attend(backend)
        assert actual.dtype == self.batch.query.dtype and actual.is_contiguous()
        tolerance = TOLERANCE[actual.dtype]
        torch.testing.assert_close(actual.double(), self.expected, rtol=tolerance["rtol"], atol=tolerance["atol"])


@functools.cache
def quantised(heads: Heads, dtype: torch.dtype, lengths: Lengths, sliding_window: int | None = None) -> QuantisedBatch:
    """Quantises a batch. K and V of every head have scales of their own; what must not be read has the code of NaN."""
    plain = make_batch(heads, dtype, lengths, sliding_window=sliding_window)
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_LAYERS, heads.num_kv_heads)
    scales = KVScales(*(torch.rand(shape, generator=generator) * 0.02 + 0.005 for _ in range(2)))
    factors = torch.stack(scales.of_layer(LAYER), dim=-1)[None, :, None, :, None, None]
    pool = (plain.pool.float() / factors).clamp(-448, 448).to(FP8)
    exact = replace(plain, pool=pool.double() * factors.double(), query=plain.query.double())
    return QuantisedBatch(replace(plain, pool=pool), scales, exact.attend(ReferenceBackend()))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attends_over_the_dequantised_pool(
    heads: Heads, window: int | None, dtype: torch.dtype, instruction_set: str
) -> None:
    case = quantised(heads, dtype, MIXED, window)
    case.check(NativeBackend(case.scales))


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("heads", [Heads(2, 1, 64), Heads(7, 1, 64)], ids=str)
def test_long_sequences_are_split_and_merged(
    heads: Heads, window: int | None, dtype: torch.dtype, instruction_set: str
) -> None:
    case = quantised(heads, dtype, LONG, window)
    case.check(NativeBackend(case.scales))


def test_the_reference_attends_over_the_dequantised_pool(dtype: torch.dtype) -> None:
    case = quantised(Heads(4, 2, 24), dtype, MIXED, 50)
    case.check(ReferenceBackend(case.scales))


def test_a_batch_does_not_change_a_bit(dtype: torch.dtype, instruction_set: str) -> None:
    """What lets a node that fetched blocks go on with the tokens of the node that computed them."""
    case = quantised(Heads(14, 2, 64), dtype, MIXED)
    backend = NativeBackend(case.scales)
    together, metadata = case.batch.attend(backend), case.batch.metadata
    for index in range(len(metadata.seq_lens)):
        begin, end = metadata.query_start_loc[index : index + 2].tolist()
        own = replace(
            metadata,
            block_tables=metadata.block_tables[index : index + 1],
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=metadata.seq_lens[index : index + 1],
        )
        alone = replace(case.batch, query=case.batch.query[begin:end], metadata=own).attend(backend)
        assert torch.equal(together[begin:end], alone)


def test_refuses_what_does_not_fit(backend: type[NativeBackend] | type[ReferenceBackend]) -> None:
    case = quantised(Heads(4, 2, 24), torch.float32, MIXED)
    with pytest.raises(ValueError, match="needs kv_scales"):
        case.batch.attend(backend())
    rows = torch.ones(2, 2, 24)
    with pytest.raises(ValueError, match="needs kv_scales"):
        backend().write_kv(rows, rows, case.batch.pool.clone(), 0, torch.tensor([0, 1]))


def test_native_refuses_scales_and_rows_that_do_not_fit() -> None:
    case = quantised(Heads(4, 2, 24), torch.float32, MIXED)
    one_head = KVScales(case.scales.key[:, :1].contiguous(), case.scales.value[:, :1].contiguous())
    with pytest.raises(ValueError, match="one value per KV head"):
        case.batch.attend(NativeBackend(one_head))
    wide = KVScales(case.scales.key.double(), case.scales.value.double())
    with pytest.raises(ValueError, match="key_scale is not float32"):
        case.batch.attend(NativeBackend(wide))
    rows = torch.ones(2, 2, 24)
    with pytest.raises(ValueError, match="value has another element type"):
        NativeBackend(case.scales).write_kv(rows, rows.half(), case.batch.pool.clone(), 0, torch.tensor([0, 1]))


def test_scales_mean_nothing_to_a_pool_that_is_not_fp8(dtype: torch.dtype) -> None:
    batch = make_batch(Heads(4, 2, 24), dtype, MIXED)
    scales = quantised(Heads(4, 2, 24), dtype, MIXED).scales
    for backend in (NativeBackend(scales), ReferenceBackend(scales)):
        batch.check(backend)
