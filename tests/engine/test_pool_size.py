"""How many blocks the pool gets and how long a sequence may be."""

from pathlib import Path

import pytest

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv_layout import KVLayout
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.pool_size import free_memory, size_pool

LAYOUT = KVLayout(num_kv_heads=2, num_layers=4, block_size=16, head_dim=64, dtype="bfloat16")  # 32 KiB a block
GIB = 1 << 30


def test_the_default_pool_is_one_gib() -> None:
    size = size_pool(EngineOptions("m"), LAYOUT, model_limit=4096, free_bytes=16 * GIB)
    assert size.num_blocks * LAYOUT.block_bytes == GIB
    assert size.max_model_len == 4096


def test_a_long_context_makes_the_default_pool_larger() -> None:
    size = size_pool(EngineOptions("m"), LAYOUT, model_limit=1_048_576, free_bytes=16 * GIB)
    assert size.num_blocks * LAYOUT.block_size == 1_048_576


def test_the_models_own_limit_is_lowered_to_what_fits() -> None:
    size = size_pool(EngineOptions("m"), LAYOUT, model_limit=1_048_576, free_bytes=2 * GIB)
    assert size.max_model_len == size.num_blocks * 16 == GIB // LAYOUT.block_bytes * 16


def test_gpu_memory_utilization_is_a_share_of_free_memory_on_a_cpu() -> None:
    size = size_pool(EngineOptions("m", gpu_memory_utilization=0.25), LAYOUT, model_limit=4096, free_bytes=16 * GIB)
    assert size.num_blocks * LAYOUT.block_bytes == 4 * GIB


def test_memory_that_holds_cached_files_counts_as_free(tmp_path: Path) -> None:
    """Otherwise a node that starts again, with its checkpoint still in the cache, would get a smaller pool."""
    (tmp_path / "meminfo").write_text("MemTotal: 67108864 kB\nMemFree: 524288 kB\nMemAvailable: 33554432 kB\n")
    assert free_memory(tmp_path / "meminfo", [tmp_path]) == 32 * GIB
    assert free_memory() > 0


def test_a_container_has_no_more_memory_than_its_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 33554432 kB\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\n")
    for limit, free in ((f"{8 * GIB}", 6 * GIB), (f"{GIB}", 0), ("max", 32 * GIB)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert free_memory(tmp_path / "meminfo", [tmp_path]) == free


def test_an_explicit_length_that_does_not_fit_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="lower max_model_len to 160, or raise num_blocks"):
        size_pool(
            EngineOptions("m", max_model_len=200), LAYOUT, model_limit=4096, free_bytes=2 * 10 * LAYOUT.block_bytes
        )
    with pytest.raises(ConfigurationError, match="lower it to 4096"):
        size_pool(EngineOptions("m", max_model_len=5000), LAYOUT, model_limit=4096, free_bytes=GIB)


def test_a_length_that_fills_the_whole_pool_is_allowed() -> None:
    num_blocks = LAYOUT.num_blocks_for(160)
    length = num_blocks * LAYOUT.block_size
    options = EngineOptions("m", max_model_len=length, num_blocks=num_blocks)
    size = size_pool(options, LAYOUT, model_limit=4096, free_bytes=GIB)
    assert (size.num_blocks, size.max_model_len) == (num_blocks, length)
