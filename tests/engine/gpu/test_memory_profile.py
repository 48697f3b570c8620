"""How much of a GPU's memory the pool gets. The arithmetic needs no GPU."""

import pytest

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine.gpu.memory_profile import (
    MemoryProfile,
    blocks_that_fit,
    graph_bytes,
    largest_recorded_step,
    largest_step,
    smaller_steps,
)
from kvrelay.engine.gpu.runner import StepLimits

LAYOUT = KVLayout(num_kv_heads=2, num_layers=4, block_size=16, head_dim=64, dtype="bfloat16")  # 32 KiB a block
GIB = 1 << 30
CONTEXT = GIB // 2  # an estimate of what a process takes besides torch's memory
PROFILE = MemoryProfile(total=80 * GIB, free=50 * GIB, resident=16 * GIB, step=2 * GIB, graphs=GIB)


def test_the_pool_gets_what_is_left_of_the_share() -> None:
    """The process's CUDA context is part of the share, so that nodes that share a GPU fit together."""
    assert PROFILE.pool_bytes(0.5) == (40 - 16 - 3) * GIB - CONTEXT


def test_the_pool_never_gets_more_than_is_free() -> None:
    """Other processes may use the GPU too. This one's context is no longer free."""
    assert PROFILE.pool_bytes(0.95) == (50 - 3) * GIB


@pytest.mark.parametrize(("wanted", "expected"), [(0, (21 * GIB - CONTEXT) // LAYOUT.block_bytes), (100, 100)])
def test_a_pool_has_as_many_blocks_as_fit_or_as_were_asked_for(wanted: int, expected: int) -> None:
    assert blocks_that_fit(PROFILE, LAYOUT, utilization=0.5, num_blocks=wanted) == expected


@pytest.mark.parametrize(
    ("num_blocks", "utilization", "what"),
    [(0, 0.2, "one KV block needs 0.00 GiB and 0.00 GiB are left"), (2**20, 0.5, "1048576 KV blocks need 32.00 GiB")],
)
def test_too_little_memory_is_refused_with_sizes_and_remedies(num_blocks: int, utilization: float, what: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{what}.*80.0 GiB GPU.*context 0.5.*weights 16.*memory_utilization"):
        blocks_that_fit(PROFILE, LAYOUT, utilization=utilization, num_blocks=num_blocks)


def test_recorded_steps_get_the_memory_of_the_largest_of_them() -> None:
    limits = StepLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
    plan = largest_recorded_step(limits, 16)
    assert (plan.num_scheduled_tokens, len(plan.scheduled)) == (512, 64)
    num_shapes = 11 + 19  # decodes: 1, 2, 4, 8, 16 .. 64; prompts: for 1 and 16 sequences seven each, for 64 five
    assert graph_bytes(GIB, limits) == GIB + num_shapes * (8 << 20)


@pytest.mark.parametrize(
    ("limits", "num_seqs", "num_tokens"),
    [
        (StepLimits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096), 64, 512),
        (StepLimits(max_num_seqs=300, max_num_batched_tokens=256, max_model_len=4096), 256, 256),
        (StepLimits(max_num_seqs=2, max_num_batched_tokens=512, max_model_len=100), 2, 198),
    ],
)
def test_the_largest_step_is_as_large_as_may_be(limits: StepLimits, num_seqs: int, num_tokens: int) -> None:
    plan = largest_step(limits, 16)
    assert (len(plan.scheduled), plan.num_scheduled_tokens) == (num_seqs, num_tokens)
    assert sum(len(entry.rows) for entry in plan.scheduled) == limits.max_num_seqs
    assert all(0 < entry.num_scheduled_tokens < limits.max_model_len for entry in plan.scheduled)
    assert all(len(entry.block_table) * 16 >= entry.num_scheduled_tokens for entry in plan.scheduled)


def test_smaller_steps_stay_within_the_limits() -> None:
    for limits in (StepLimits(4, 1, 100), StepLimits(1, 16, 2), StepLimits(2, 512, 100), StepLimits(64, 512, 4096)):
        for plan in smaller_steps(limits, 16):
            assert len(plan.scheduled) <= limits.max_num_seqs
            assert plan.num_scheduled_tokens <= limits.max_num_batched_tokens
            assert all(0 < entry.num_scheduled_tokens < limits.max_model_len for entry in plan.scheduled)
            assert all(len(entry.block_table) * 16 >= entry.num_scheduled_tokens for entry in plan.scheduled)
