"""Writing KV into the pool: exactly the slots asked for, nothing else."""

import pytest
import torch
from paged_kernels.cpu.native import NativeBackend
from paged_kernels.reference import ReferenceBackend


@pytest.mark.parametrize("backend", [NativeBackend(), ReferenceBackend()], ids=lambda backend: str(backend.name))
@pytest.mark.parametrize("num_tokens", [0, 1, 40, 3000])
def test_writes_only_its_slots(
    backend: NativeBackend | ReferenceBackend, num_tokens: int, dtype: torch.dtype, num_threads: int
) -> None:
    pool = torch.zeros(200, 2, 3, 2, 16, 24, dtype=dtype)
    fused = torch.randn(num_tokens, 6, 24).to(dtype)  # keys and values are views of one projection
    key, value = fused[:, 2:4], fused[:, 4:6]
    slots = torch.randperm(200 * 16)[:num_tokens]
    expected = pool.clone()
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 16, :, 1, 0, slot % 16] = key[token]
        expected[slot // 16, :, 1, 1, slot % 16] = value[token]
    backend.write_kv(key, value, pool, 1, slots)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("slot", [-1, 64])
def test_refuses_slots_outside_the_pool(slot: int) -> None:
    pool = torch.zeros(4, 1, 1, 2, 16, 8)
    rows = torch.ones(2, 1, 8)
    with pytest.raises(IndexError, match="slot_mapping"):
        NativeBackend().write_kv(rows, rows, pool, 0, torch.tensor([0, slot]))
    assert not pool.any()


def test_refuses_shapes_that_do_not_fit() -> None:
    pool = torch.zeros(4, 2, 1, 2, 16, 8)
    rows = torch.ones(2, 2, 8)
    with pytest.raises(ValueError, match="differ in tokens"):
        NativeBackend().write_kv(rows, rows, pool, 0, torch.tensor([0]))
    with pytest.raises(ValueError, match="KV heads"):
        NativeBackend().write_kv(rows[:, :1], rows, pool, 0, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="contiguous"):
        NativeBackend().write_kv(rows, rows, pool[:, :, :, :, ::2], 0, torch.tensor([0, 1]))
