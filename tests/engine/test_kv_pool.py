"""The pool's tensor lies over the given memory and has the layout's dtype."""

import torch

from kvrelay.core.kv_layout import KVLayout
from kvrelay.engine.kv_pool import allocate_pool, pool_over

LAYOUT = KVLayout(num_kv_heads=2, num_layers=1, block_size=4, head_dim=8, dtype="bfloat16")


def test_a_pool_over_memory_shares_it() -> None:
    memory = bytearray(3 * LAYOUT.block_bytes)
    pool = pool_over(memoryview(memory), LAYOUT, 3)
    assert pool.shape == (3, *LAYOUT.block_shape) and pool.dtype is torch.bfloat16
    pool[1].fill_(1.0)
    assert not any(memory[: LAYOUT.block_bytes]) and any(memory[LAYOUT.block_bytes : 2 * LAYOUT.block_bytes])


def test_a_pool_of_its_own_is_zeroed() -> None:
    pool = allocate_pool(LAYOUT, 3)
    assert pool.shape == (3, *LAYOUT.block_shape) and not pool.any()
