"""Random batches over a paged pool in which everything that must not be read is NaN."""

import functools
from dataclasses import dataclass

import torch
from paged_kernels.base import AttentionBackend, AttentionMetadata
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

NUM_LAYERS = 3
LAYER = 1

# Inputs are exact in every dtype's own precision, so what remains is the rounding of weights and outputs.
TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 5e-3},
    torch.float16: {"rtol": 2**-10, "atol": 1e-3},
}


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16


Lengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step's inputs for attention. `num_prefix[i]` tokens of sequence i were computed before; `num_new[i]` are this
    step's queries."""

    heads: Heads
    pool: Tensor
    query: Tensor
    metadata: AttentionMetadata
    sliding_window: int | None

    def attend(self, backend: AttentionBackend) -> Tensor:
        return backend.attend(
            self.query,
            self.pool,
            LAYER,
            self.metadata,
            scale=self.heads.head_dim**-0.5,
            sliding_window=self.sliding_window,
        )

    def check(self, backend: AttentionBackend) -> None:
        actual = self.attend(backend)
        assert actual.dtype == self.query.dtype and actual.is_contiguous()
        tolerance = TOLERANCE[actual.dtype]
        torch.testing.assert_close(actual.double(), expected(self), rtol=tolerance["rtol"], atol=tolerance["atol"])


@functools.cache
def expected(batch: Batch) -> Tensor:
    """Returns the oracle's answer in float64."""
    exact = Batch(batch.heads, batch.pool.double(), batch.query.double(), batch.metadata, batch.sliding_window)
    return exact.attend(ReferenceBackend())


@functools.cache
def make_batch(
    heads: Heads,
    dtype: torch.dtype,
    lengths: Lengths,
    *,
    sliding_window: int | None = None,
    seed: int = 0,
) -> Batch:
    """Makes a batch of `(num_prefix, num_new)` sequences in shuffled blocks. Tests share it and must not write to it.

    NaN: other layers, unused slots, what no window reaches.
    """
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [prefix + new for prefix, new in lengths]
    num_blocks = [-(-length // heads.block_size) for length in seq_lens]
    shape = (sum(num_blocks) + 2, heads.num_kv_heads, NUM_LAYERS, 2, heads.block_size, heads.head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype)
    order = torch.randperm(shape[0], generator=generator).tolist()
    block_tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    slots: list[int] = []
    for index, (prefix, new) in enumerate(lengths):
        table = [order.pop() for _ in range(num_blocks[index])]
        block_tables[index, : len(table)] = torch.tensor(table)
        visible = 0 if sliding_window is None else max(0, prefix + 1 - sliding_window)
        sequence_slots = [
            table[p // heads.block_size] * heads.block_size + p % heads.block_size for p in range(prefix + new)
        ]
        for position in range(visible, prefix + new):
            slot = sequence_slots[position]
            rows = torch.randn(heads.num_kv_heads, 2, heads.head_dim, generator=generator)
            pool[slot // heads.block_size, :, LAYER, :, slot % heads.block_size] = rows.to(dtype)
        slots += sequence_slots[prefix:]
    query_lens = [new for _, new in lengths]
    metadata = AttentionMetadata(
        slot_mapping=torch.tensor(slots),
        block_tables=block_tables,
        query_start_loc=torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    query = torch.randn(sum(query_lens), heads.num_heads, heads.head_dim, generator=generator).to(dtype)
    return Batch(heads, pool, query, metadata, sliding_window)
