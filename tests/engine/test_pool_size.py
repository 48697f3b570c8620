"""How many blocks the pool gets and how long a sequence may be."""

import pytest

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.pool_size import size_pool

LAYOUT = KVLayout(num_kv_heads=2, num_layers=4, block_size=16, head_dim=64, dtype="bfloat16")  # 32 KiB a block
GIB = 1 << 30


def test_the_default_pool_is_one_gib() -> None:
    size = size_pool(EngineOptions("m"), LAYOUT, max_model_len=4096, free_bytes=16 * GIB)
    assert size.num_blocks * LAYOUT.block_bytes == GIB
    assert size.max_model_len == 4096


def test_a_long_context_makes_the_default_pool_larger() -> None:
    size = size_pool(EngineOptions("m"), LAYOUT, max_model_len=1_048_576, free_bytes=16 * GIB)
    assert size.num_blocks * LAYOUT.block_size == 1_048_576


def test_the_models_own_limit_is_lowered_to_what_fits() -> None:
    size = size_pool(EngineOptions("m"), LAYOUT, max_model_len=1_048_576, free_bytes=2 * GIB)
    assert size.max_model_len == size.num_blocks * 16 == GIB // LAYOUT.block_bytes * 16


def test_nodes_that_start_together_leave_some_memory_free() -> None:
    """Each of them sees all that is free."""
    options = EngineOptions("m", nodes_per_device=3)
    size = size_pool(options, LAYOUT, max_model_len=1_048_576, free_bytes=2 * GIB)
    assert size.num_blocks * LAYOUT.block_bytes == GIB // 2


def test_gpu_memory_utilization_is_a_share_of_free_memory_on_a_cpu() -> None:
    size = size_pool(EngineOptions("m", gpu_memory_utilization=0.25), LAYOUT, max_model_len=4096, free_bytes=16 * GIB)
    assert size.num_blocks * LAYOUT.block_bytes == 4 * GIB


def test_a_number_of_blocks_takes_precedence_over_a_share_of_memory() -> None:
    options = EngineOptions("m", num_blocks=512, gpu_memory_utilization=0.25)
    assert size_pool(options, LAYOUT, max_model_len=4096, free_bytes=16 * GIB).num_blocks == 512


@pytest.mark.parametrize("max_model_len", [0, 200])
def test_a_share_of_memory_too_small_for_a_block_is_refused(max_model_len: int) -> None:
    options = EngineOptions("m", gpu_memory_utilization=0.0001, max_model_len=max_model_len)
    with pytest.raises(ConfigurationError, match="0 blocks holds no sequence; raise num_blocks or gpu_memory_util"):
        size_pool(options, LAYOUT, max_model_len=max_model_len or 4096, free_bytes=9999 * LAYOUT.block_bytes)


def test_an_explicit_length_that_does_not_fit_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="lower max_model_len to 160, or raise num_blocks"):
        size_pool(
            EngineOptions("m", max_model_len=200), LAYOUT, max_model_len=200, free_bytes=2 * 10 * LAYOUT.block_bytes
        )


def test_a_length_that_fills_the_whole_pool_is_allowed() -> None:
    num_blocks = LAYOUT.num_blocks_for(160)
    length = num_blocks * LAYOUT.block_size
    options = EngineOptions("m", max_model_len=length, num_blocks=num_blocks)
    size = size_pool(options, LAYOUT, max_model_len=length, free_bytes=GIB)
    assert (size.num_blocks, size.max_model_len) == (num_blocks, length)
