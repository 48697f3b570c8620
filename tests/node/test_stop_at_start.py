"""A node that is told to stop before its start has ended."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.node_report import NodeRole
from kvrelay.engine.engine import Engine
from kvrelay.engine.startup import PreparedEngine
from kvrelay.node import process
from kvrelay.node.settings import NodeSettings
from tests.engine.tiny_models import make_tiny_model

PATIENCE = 10.0


async def test_a_node_that_is_stopped_while_its_engine_is_built_ends_at_once_and_leaves_no_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that takes long: kernels are compiled, and steps recorded."""
    pools, stop, may_build, built = tmp_path / "pools", asyncio.Event(), threading.Event(), threading.Event()
    pools.mkdir()
    found: list[Path] = []
    build = PreparedEngine.build
    loop = asyncio.get_running_loop()

    def build_slowly(*args: Any, **options: Any) -> Engine:
        found.extend(pools.iterdir())
        loop.call_soon_threadsafe(stop.set)
        assert may_build.wait(PATIENCE)
        try:
            return build(*args, **options)
        finally:
            built.set()

    monkeypatch.setattr(PreparedEngine, "build", build_slowly)
    settings = NodeSettings(
        model=str(make_tiny_model("llama", tmp_path / "model", vocab_size=320)),
        connector="shared_memory",
        shared_memory_dir=str(pools),
        device="cpu",
        num_blocks=64,
        threads=1,
    )
    with pytest.raises(process._ThreadLeftError, match="stopped while loading"):
        await process._build_unless_stopped(settings, NodeRole.DECODE, stop)
    assert len(found) == 1 and not list(pools.iterdir())
    may_build.set()
    assert await asyncio.to_thread(built.wait, PATIENCE), "it may use the memory of its pool to the end"
