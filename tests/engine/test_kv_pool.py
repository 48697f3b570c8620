"""The pool's tensor lies over the given memory and has the layout's dtype."""

import mmap
import subprocess
import sys
from typing import NoReturn

import pytest
import torch

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine.kv_pool import allocate_pool, pool_over

LAYOUT = KVLayout(num_kv_heads=2, num_layers=1, block_size=4, head_dim=8, dtype="bfloat16")


def test_a_pool_over_memory_shares_it() -> None:
    memory = bytearray(3 * LAYOUT.block_bytes)
    pool = pool_over(memoryview(memory), LAYOUT, 3)
    assert pool.shape == (3, *LAYOUT.block_shape) and pool.dtype is torch.bfloat16
    pool[1].fill_(1.0)
    assert not any(memory[: LAYOUT.block_bytes]) and any(memory[LAYOUT.block_bytes : 2 * LAYOUT.block_bytes])


def test_memory_stays_mapped_as_long_as_the_pool() -> None:
    memory = mmap.mmap(-1, 3 * LAYOUT.block_bytes)
    view = memoryview(memory)
    pool = pool_over(view, LAYOUT, 3)
    view.release()
    with pytest.raises(BufferError):
        memory.close()
    pool[2].fill_(1.0)
    del pool
    memory.close()


def test_a_pool_of_its_own_is_zeroed() -> None:
    pool = allocate_pool(LAYOUT, 3)
    assert pool.shape == (3, *LAYOUT.block_shape) and not pool.any()


def test_a_forked_process_has_a_pool_of_its_own() -> None:
    code = (
        "import os; from kvrelay.engine.kv_pool import allocate_pool; from tests.engine.test_kv_pool import LAYOUT\n"
        "pool = allocate_pool(LAYOUT, 3)\n"
        "if os.fork() == 0: pool.fill_(1.0); os._exit(0)\n"
        "assert os.wait()[1] == 0 and not pool.any()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("num_blocks", [2**45, 2**70])
def test_a_pool_that_does_not_fit_into_memory_is_a_configuration_error(num_blocks: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"no memory for {num_blocks} KV blocks .*lower num_blocks"):
        allocate_pool(LAYOUT, num_blocks)


def test_a_pool_that_does_not_fit_on_a_gpu_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*args: object, **options: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB\nand much more to say")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ConfigurationError, match=r"no room for 3 KV blocks .*gpu_memory_utilization.*1 TiB\)$"):
        allocate_pool(LAYOUT, 3, torch.device("meta"))
