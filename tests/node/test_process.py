"""The end of a node's process, whatever keeps its loop from ending."""

import asyncio
import logging
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
    assert process.main("decode", DecodeService, NodeSettings(model="m")) == 1
    assert [record.message for record in caplog.records] == ["blocks do not arrive", "the loop waits"]
