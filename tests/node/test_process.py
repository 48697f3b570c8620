"""The end of a node's process, whatever keeps its loop from ending."""

import asyncio
import logging
import re
import signal
from contextlib import suppress
from typing import Any

import pytest

from decode_node.service import DecodeService
from kvrelay.core.errors import ConfigurationError, KVRelayError
from kvrelay.node import process
from kvrelay.node.node import Node
from kvrelay.node.settings import NodeSettings
from tests.name_service import give_addresses
from tests.node.fake_node import make_node


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


@pytest.mark.parametrize(
    ("host", "address", "warns"),
    [("vm.example", "127.0.1.1", True), ("vm.example", "0.0.0.0", False), ("127.0.0.1", "127.0.0.1", False)],
)
async def test_a_name_that_only_this_machine_reaches_is_warned_of_before_the_model_is_loaded(
    host: str, address: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Debian gives a machine's own name the address 127.0.1.1."""
    give_addresses(monkeypatch, "vm.example", address)
    with pytest.raises(KVRelayError):
        await process._serve(NodeSettings(model="/no/such/model", host=host), DecodeService)
    assert ("`vm.example` is a loopback address here: only this machine reaches it" in caplog.text) is warns


@pytest.mark.parametrize(("host", "beside"), [("localhost", r" \((127\.0\.0\.1|::1)\)"), ("127.0.0.1", "")])
async def test_a_node_says_at_which_address_it_is_ready(
    host: str, beside: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def build(*_: Any) -> Node:
        return make_node()

    def announce(**_: Any) -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)

    monkeypatch.setattr(process, "build_node", build)
    monkeypatch.setattr(process, "announce_ready", announce)
    caplog.set_level(logging.INFO)
    assert await process._serve(NodeSettings(model="m", host=host), DecodeService) == 0
    assert any(re.search(rf" is ready on {host}:\d+{beside}$", message) for message in caplog.messages)
