"""Decode and prefill attention against the oracle in float64; everything that must not be read is NaN."""

import itertools
from dataclasses import replace

import pytest
import torch
from paged_kernels.base import AttentionMetadata
from paged_kernels.gpu import attention
from paged_kernels.gpu.attention import AttentionCall, TritonBackend, num_splits, plan_attention
from paged_kernels.gpu.device.prefill import prefill_attention_kernel
from paged_kernels.gpu.launch import GpuTraits, KernelCall, launch
from paged_kernels.reference import ReferenceBackend

from tests.kernels.batch import Heads, Lengths, make_batch

DECODE: Lengths = tuple((length - 1, 1) for length in (1, 16, 17, 63, 65, 130))
PREFIX: Lengths = ((16, 16), (0, 70), (130, 2), (63, 1))
CHUNKS: Lengths = ((40, 70), (0, 33), (150, 1), (3, 129))
MIXED: Lengths = ((20, 1), (0, 33), (150, 1), (0, 1), (5, 7))
FEW: Lengths = ((300, 7), (20, 1), (0, 16), (150, 2), (130, 1), (64, 15))

HEAD_DIMS = [Heads(4, 2, 64), Heads(4, 2, 80), Heads(2, 1, 96), Heads(2, 1, 128, 32), Heads(2, 1, 256)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEW_HEADS = [Heads(3, 1, 80), Heads(14, 2, 64, 32), Heads(20, 1, 64)]
WINDOWS = (None, 40)
GROUPS = [Heads(2, 2, 64), Heads(3, 1, 64), Heads(14, 2, 64, 32), Heads(20, 1, 64)]


@pytest.fixture
def always_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MIN_SPLIT_TOKENS", 16)


@pytest.mark.parametrize("lengths", [DECODE, PREFIX, MIXED, FEW], ids=["decode", "prefix", "mixed", "few"])
def test_agrees_with_reference(lengths: Lengths, dtype: torch.dtype) -> None:
    make_batch(Heads(4, 2, 64), dtype, lengths).check(TritonBackend())


@pytest.mark.parametrize(
    ("heads", "dtype"), list(zip(HEAD_DIMS + GROUPS, itertools.cycle(DTYPES), strict=False)), ids=str
)
def test_any_heads(heads: Heads, dtype: torch.dtype) -> None:
    make_batch(heads, dtype, MIXED).check(TritonBackend())


@pytest.mark.parametrize("window", [1, 16, 100, 1000])
@pytest.mark.parametrize("lengths", [DECODE, PREFIX, MIXED, FEW], ids=["decode", "prefix", "mixed", "few"])
def test_sliding_window(lengths: Lengths, window: int) -> None:
    make_batch(Heads(4, 2, 64), torch.float16, lengths, sliding_window=window).check(TritonBackend())


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("heads", [Heads(8, 2, 128), Heads(3, 1, 80)], ids=str)
def test_as_many_rows_as_a_large_gpu_takes(heads: Heads, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[KernelCall] = []

    def record(calls: list[KernelCall]) -> None:
        launched.extend(calls)
        launch(calls)

    traits = GpuTraits(num_sms=4, shared_bytes=227 << 10)  # few enough for one program each to fill them
    monkeypatch.setattr(attention, "traits_of", lambda device: traits)
    monkeypatch.setattr(attention, "launch", record)
    make_batch(heads, torch.float16, CHUNKS, sliding_window=window).check(TritonBackend())
    [prefill] = (call for call in launched if call.kernel is prefill_attention_kernel)
    assert prefill.constants["ROWS"] == prefill.constants["TILE"] == 128


@pytest.mark.parametrize("window", [None, 40])
def test_split_sequences_are_merged(always_split: None, window: int | None, dtype: torch.dtype) -> None:
    """Also where splits have nothing to do: 1 token for 8 programs."""
    make_batch(Heads(3, 1, 80), dtype, ((0, 1), (299, 1), (16, 1)), sliding_window=window).check(TritonBackend())


@pytest.mark.parametrize(
    ("heads", "window", "dtype"),
    [(*one, dtype) for one, dtype in zip(itertools.product(FEW_HEADS, WINDOWS), itertools.cycle(DTYPES), strict=False)],
    ids=str,
)
def test_few_tokens_are_split_and_merged(
    always_split: None, heads: Heads, window: int | None, dtype: torch.dtype
) -> None:
    """Also in several tiles of rows, where as many as 16 times the heads do not fit into one."""
    make_batch(heads, dtype, FEW, sliding_window=window).check(TritonBackend())


def test_a_prompt_that_leaves_the_gpu_idle_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    traits = GpuTraits(num_sms=132, shared_bytes=227 << 10)
    monkeypatch.setattr(attention, "traits_of", lambda device: traits)
    batch = make_batch(Heads(4, 2, 64), torch.float16, ((500, 40),))
    call = AttentionCall(batch.query, batch.query, batch.pool, 0, batch.metadata, 0.1, None, None)
    first, _merge = plan_attention(call, traits)
    assert first.grid == (2, 2, 5)
    batch.check(TritonBackend())


def test_padding_of_a_batch_gives_zeros(always_split: None) -> None:
    batch = make_batch(Heads(4, 2, 64), torch.float32, ((40, 1), (300, 1)))
    metadata = replace(
        batch.metadata,
        query_start_loc=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        seq_lens=torch.cat((batch.metadata.seq_lens, torch.zeros(1, dtype=torch.int32))),
        block_tables=torch.cat((batch.metadata.block_tables, torch.zeros_like(batch.metadata.block_tables[:1]))),
    )
    padded = replace(batch, query=torch.cat((batch.query, batch.query[:1])), metadata=metadata)
    output = padded.attend(TritonBackend())
    torch.testing.assert_close(output[:2], batch.attend(TritonBackend()))
    assert not output[2].any()


def test_strided_queries() -> None:
    batch = make_batch(Heads(4, 2, 64), torch.float32, MIXED)
    fused = torch.randn(batch.query.shape[0], 8, 64)
    fused[:, 2:6] = batch.query
    replace(batch, query=fused[:, 2:6]).check(TritonBackend())


def test_number_of_splits() -> None:
    assert num_splits(8, 100, 528) == 1
    assert num_splits(8, 4096, 528) == 32
    assert num_splits(8, 32768, 528) == 64
    assert num_splits(16 * 8, 4096, 528) == 4, "one wave"
    assert num_splits(40 * 8, 4096, 528) == 3, "two waves of a third each"
    assert num_splits(48 * 8, 4096, 528) == 1, "nearly full"
    assert num_splits(256 * 8, 4096, 528) == 1


@pytest.mark.parametrize("num_programs", [1, 7, 30, 100, 300, 474])
@pytest.mark.parametrize("longest", [300, 5000, 1 << 17])
def test_splits_keep_their_limits(num_programs: int, longest: int) -> None:
    splits = num_splits(num_programs, longest, 528)
    assert 1 <= splits <= min(64, -(-longest // 128))


def test_refuses_what_does_not_fit() -> None:
    batch = make_batch(Heads(4, 2, 64), torch.float32, ((3, 1),))
    with pytest.raises(ValueError, match="float16"):
        replace(batch, query=batch.query.half()).attend(TritonBackend())
    with pytest.raises(ValueError, match="kv_scales"):
        replace(batch, pool=batch.pool.to(torch.float8_e4m3fn)).attend(TritonBackend())
    with pytest.raises(ValueError, match="multiple of KV heads"):
        replace(batch, query=batch.query[:, :3]).attend(TritonBackend())


@pytest.mark.parametrize("new", [1, 5])
def test_offsets_beyond_32_bits(new: int) -> None:
    """Blocks at the end of a pool of more than 2**31 elements, of which only those blocks are ever touched."""
    pool = torch.empty(33_000, 4, 8, 2, 16, 64, dtype=torch.float16)
    assert pool.numel() > 2**31
    blocks = torch.tensor([[32_999, 32_990]], dtype=torch.int32)
    metadata = AttentionMetadata(
        slot_mapping=torch.cat((blocks[0, 0] * 16 + torch.arange(16), blocks[0, 1] * 16 + torch.arange(4))).long(),
        block_tables=blocks,
        query_start_loc=torch.tensor([0, new], dtype=torch.int32),
        seq_lens=torch.tensor([20], dtype=torch.int32),
        max_query_len=new,
        max_seq_len=20,
    )
    key, value = torch.randn(2, 20, 4, 64).half()
    query = torch.randn(new, 8, 64).half()
    still = torch.ones(20, 32), torch.zeros(20, 32)
    TritonBackend().write_kv_rotary(key.clone(), key, value, still, pool, 7, metadata.slot_mapping)
    actual = TritonBackend().attend(query, pool, 7, metadata, scale=0.1)
    expected = ReferenceBackend().attend(query, pool, 7, metadata, scale=0.1)
    torch.testing.assert_close(actual, expected, rtol=2**-10, atol=1e-3)
