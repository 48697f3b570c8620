"""The end of a node's process, whatever keeps its loop from ending."""

import asyncio
import logging
from contextlib import suppress
from typing import Any

import pytest

from decode_node.service import DecodeService
from kvrelay.core.errors import ConfigurationError
from kvrelay.node import process
from kvrelay.node.settings import NodeSettings


def test_why_a_node_ends_is_logged_before_its_loop_waits_for_what_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A transfer whose driver hangs does not end, and the loop waits for it."""
    tasks = set[asyncio.Task[None]]()

    async def transfer() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            logging.getLogger(__name__).warning("the loop waits")

    async def serve(*_: Any) -> int:
        tasks.add(asyncio.create_task(transfer()))
        await asyncio.sleep(0)
        raise ConfigurationError("blocks do not arrive")

    monkeypatch.setattr(process, "_serve", serve)
    monkeypatch.setattr(process, "configure_logging", lambda *_: None)
    assert process.main(DecodeService, NodeSettings(model="m")) == 1
    assert [record.message for record in caplog.records] == ["blocks do not arrive", "the loop waits"]


def test_a_loop_that_does_not_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as that of a UCX connection whose buffers UCX does not let go of, which waits whatever cancels it."""
    tasks = set[asyncio.Task[None]]()
    statuses: list[int] = []

    async def hang(released: asyncio.Event) -> None:
        while not released.is_set():
            with suppress(asyncio.CancelledError):
                await released.wait()

    async def serve(*_: Any) -> int:
        released, loop = asyncio.Event(), asyncio.get_running_loop()

        def end(status: int) -> None:
            statuses.append(status)
            loop.call_soon_threadsafe(released.set)

        monkeypatch.setattr("os._exit", end)
        tasks.add(asyncio.create_task(hang(released)))
        await asyncio.sleep(0)
        return 0

    monkeypatch.setattr(process, "_serve", serve)
    monkeypatch.setattr(process, "configure_logging", lambda *_: None)
    monkeypatch.setattr(process, "_CLOSE_SECONDS", 0.05)
    process.main(DecodeService, NodeSettings(model="m"))
    assert statuses == [1] and "ended without closing" in caplog.text
