"""The compiled attention against the oracle in float64, on every instruction set, for every kind of batch."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from paged_kernels.cpu.native import NativeBackend
from paged_kernels.cpu.threads import threads_kept, use_threads

from tests.kernels.batch import LAYER, Batch, Heads, Lengths, make_batch

DECODE: Lengths = tuple((length - 1, 1) for length in (1, 2, 15, 16, 17, 31, 32, 63, 64, 65, 128, 299, 300))
PREFILL: Lengths = tuple((0, length) for length in (1, 2, 3, 15, 16, 17, 64, 100))
PREFIX: Lengths = ((16, 16), (1, 40), (48, 3), (130, 2), (63, 1), (64, 65))
MIXED: Lengths = ((20, 1), (0, 33), (64, 16), (300, 1), (0, 1), (5, 7))

EVERY_LENGTH: Lengths = tuple((length - 1, 1) for length in range(1, 301))

GROUPS = [Heads(2, 2, 64), Heads(4, 2, 64), Heads(3, 1, 64), Heads(14, 2, 64), Heads(8, 1, 64)]
HEAD_DIMS = [Heads(4, 2, dim) for dim in (8, 24, 72, 80, 96, 128)] + [
    Heads(8, 2, dim) for dim in (8, 40, 80, 96, 128, 256)
]
BLOCK_SIZES = [Heads(4, 1, 64, size) for size in (8, 24, 32, 64, 128)]


@pytest.mark.parametrize("lengths", [DECODE, PREFILL, PREFIX, MIXED], ids=["decode", "prefill", "prefix", "mixed"])
@pytest.mark.parametrize("heads", GROUPS, ids=str)
def test_agrees_with_reference(heads: Heads, lengths: Lengths, dtype: torch.dtype, instruction_set: str) -> None:
    make_batch(heads, dtype, lengths).check(NativeBackend())


@pytest.mark.parametrize("heads", HEAD_DIMS + BLOCK_SIZES, ids=str)
def test_any_head_dim_and_block_size(heads: Heads, dtype: torch.dtype, instruction_set: str) -> None:
    make_batch(heads, dtype, MIXED).check(NativeBackend())


@pytest.mark.parametrize("window", [1, 16, 100, 1000])
@pytest.mark.parametrize("heads", [Heads(2, 2, 64), Heads(8, 2, 64)], ids=str)
def test_sliding_window(heads: Heads, window: int, dtype: torch.dtype, instruction_set: str) -> None:
    make_batch(heads, dtype, MIXED, sliding_window=window).check(NativeBackend())


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("heads", [Heads(2, 1, 64), Heads(7, 1, 64)], ids=str)
def test_long_sequences_are_split_and_merged(
    heads: Heads, window: int | None, dtype: torch.dtype, instruction_set: str, num_threads: int
) -> None:
    lengths = ((511, 1), (512, 1), (1023, 1), (1500, 1), (1500, 6))
    make_batch(heads, dtype, lengths, sliding_window=window).check(NativeBackend())


def test_every_length(instruction_set: str) -> None:
    make_batch(Heads(2, 1, 16), torch.float32, EVERY_LENGTH).check(NativeBackend())


def test_threads_do_not_change_a_bit(dtype: torch.dtype, instruction_set: str) -> None:
    batch = make_batch(Heads(14, 2, 64), dtype, ((0, 300), (1400, 1), (700, 1), (100, 200)))
    results = []
    with threads_kept():
        for count in (1, 2, 3):
            use_threads(count)
            results.append(batch.attend(NativeBackend()))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_batch_does_not_change_a_bit(dtype: torch.dtype, instruction_set: str) -> None:
    batch = make_batch(Heads(14, 2, 64), dtype, (*MIXED, (1000, 1)))
    together = batch.attend(NativeBackend())
    for index in range(len(batch.metadata.seq_lens)):
        begin, end = batch.metadata.query_start_loc[index : index + 2].tolist()
        metadata = replace(
            batch.metadata,
            block_tables=batch.metadata.block_tables[index : index + 1],
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=batch.metadata.seq_lens[index : index + 1],
        )
        alone = replace(batch, query=batch.query[begin:end], metadata=metadata).attend(NativeBackend())
        assert torch.equal(together[begin:end], alone)


@pytest.mark.parametrize("chunks", [[100, 100], [64, 136], [7, 190, 3], [199, 1]])
@pytest.mark.parametrize("window", [None, 50])
def test_chunked_prefill_does_not_change_a_bit(
    chunks: list[int], window: int | None, dtype: torch.dtype, instruction_set: str
) -> None:
    """Holds where the heads of a group alone make enough rows for the packed path, whatever the chunk."""
    whole = make_batch(Heads(8, 2, 64), dtype, ((0, sum(chunks)),), sliding_window=window)
    expected = whole.attend(NativeBackend())
    begin = 0
    for chunk in chunks:
        metadata = replace(
            whole.metadata,
            query_start_loc=torch.tensor([0, chunk], dtype=torch.int32),
            seq_lens=torch.tensor([begin + chunk], dtype=torch.int32),
        )
        part = replace(whole, query=whole.query[begin : begin + chunk], metadata=metadata)
        assert torch.equal(part.attend(NativeBackend()), expected[begin : begin + chunk])
        begin += chunk


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("heads", [Heads(8, 2, 64), Heads(7, 1, 32)])
def test_decodes_of_long_sequences_and_prefills_agree_to_the_bit(
    heads: Heads, window: int | None, dtype: torch.dtype, instruction_set: str
) -> None:
    """Decodes join the results of chunks of KV, which threads divide; what recomputes their KV must not differ."""
    whole = make_batch(heads, dtype, ((0, 2100),), sliding_window=window)
    expected = whole.attend(NativeBackend())
    for position in (1023, 1024, 1300, 2047, 2048, 2099):
        metadata = replace(
            whole.metadata,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([position + 1], dtype=torch.int32),
        )
        decode = replace(whole, query=whole.query[position : position + 1], metadata=metadata)
        assert torch.equal(decode.attend(NativeBackend())[0], expected[position]), position


def test_strided_queries(instruction_set: str) -> None:
    """Queries are usually a view of the fused projection of queries, keys and values."""
    batch = make_batch(Heads(4, 2, 64), torch.float32, MIXED)
    fused = torch.randn(batch.query.shape[0], 8, 64)
    fused[:, 2:6] = batch.query
    replace(batch, query=fused[:, 2:6]).check(NativeBackend())


def test_concurrent_callers() -> None:
    """Two engines of one process may attend at the same time."""
    batches = [make_batch(Heads(7, 1, 64), torch.float32, MIXED, seed=seed) for seed in range(4)]
    expected = [batch.attend(NativeBackend()) for batch in batches]

    def attend_often(batch: Batch) -> list[torch.Tensor]:
        return [batch.attend(NativeBackend()) for _ in range(20)]

    with ThreadPoolExecutor(max_workers=4) as pool:
        for results, value in zip(pool.map(attend_often, batches), expected, strict=True):
            assert all(torch.equal(result, value) for result in results)


def test_amid_torch_matrix_products(instruction_set: str) -> None:
    """torch's own use of the matrix unit, before, between and after ours, stays as it was."""
    batch = make_batch(Heads(8, 2, 64), torch.bfloat16, MIXED)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(256, 256, generator=generator).bfloat16()
    product = weight @ weight
    for _ in range(3):
        batch.check(NativeBackend())
        assert torch.equal(weight @ weight, product)


def test_huge_scores_and_no_sequences(instruction_set: str) -> None:
    batch = make_batch(Heads(4, 1, 64), torch.float32, MIXED)
    assert replace(batch, query=batch.query * 1e6).attend(NativeBackend()).isfinite().all()
    metadata = replace(
        batch.metadata,
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
    )
    assert replace(batch, query=batch.query[:0], metadata=metadata).attend(NativeBackend()).shape == (0, 4, 64)


def test_refuses_what_does_not_fit() -> None:
    backend = NativeBackend()
    batch = make_batch(Heads(4, 2, 64), torch.float32, MIXED)
    outside = batch.metadata.block_tables.clone()
    outside[3, 2] = batch.pool.shape[0]
    with pytest.raises(IndexError, match="block_tables"):
        replace(batch, metadata=replace(batch.metadata, block_tables=outside)).attend(backend)
    with pytest.raises(ValueError, match="element type"):
        replace(batch, query=batch.query.bfloat16()).attend(backend)
    with pytest.raises(ValueError, match="KV heads"):
        replace(batch, query=batch.query[:, :3]).attend(backend)
    with pytest.raises(ValueError, match="KV heads"):
        replace(batch, pool=batch.pool[:, :0]).attend(backend)
    with pytest.raises(ValueError, match="seq_lens is not int32"):
        replace(batch, metadata=replace(batch.metadata, seq_lens=batch.metadata.seq_lens.long())).attend(backend)
    with pytest.raises(ValueError, match="query_start_loc"):
        replace(batch, query=batch.query[1:]).attend(backend)
    with pytest.raises(ValueError, match="more blocks"):
        short = replace(batch.metadata, block_tables=batch.metadata.block_tables[:, :2].contiguous())
        replace(batch, metadata=short).attend(backend)
    with pytest.raises(ValueError, match="layer"):
        backend.attend(batch.query, batch.pool, LAYER + 2, batch.metadata, scale=1.0)
