"""The process around a node: serves gRPC, says when it is ready, and ends in order.

Standard output carries one JSON line, for whoever started the process; everything else is logged to standard error.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

from kvrelay.core.config import load_settings
from kvrelay.core.errors import KVRelayError
from kvrelay.core.logs import configure_logging
from kvrelay.node.node import Node
from kvrelay.node.server import NodeServer, Service
from kvrelay.node.settings import NodeSettings
from kvrelay.node.startup import build_node

_logger = logging.getLogger(__name__)


def main(role: str, make_service: Callable[[Node], Service], argv: Sequence[str]) -> int:
    """Runs one node until it is told to stop; returns the exit status."""
    settings = load_settings(NodeSettings, argv, prog=f"kvrelay {role}")
    configure_logging(settings.node_id or role, settings.log_level)
    try:
        return asyncio.run(_serve(settings, role, make_service))
    except KVRelayError as error:
        _logger.critical("%s", error)
        return 1


async def _serve(settings: NodeSettings, role: str, make_service: Callable[[Node], Service]) -> int:
    stop = _stop_event(settings)
    node = build_node(settings, role)
    server = NodeServer(node, make_service(node))
    try:
        port = await server.start(settings.host, settings.port)
        _announce(role, f"{settings.host}:{port}", node.identity.node_id)
        crashed = await _first(stop.wait(), node.crashed.wait()) == 1
    finally:
        await server.close()
    return 1 if crashed else 0


def _announce(role: str, address: str, node_id: str) -> None:
    line = json.dumps({"event": "ready", "role": role, "address": address, "node_id": node_id})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    _logger.info("%s is ready on %s", node_id, address)


def _stop_event(settings: NodeSettings) -> asyncio.Event:
    """Set by SIGINT, SIGTERM, and for a supervised process by the end of its standard input."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if settings.supervised:
        loop.add_reader(sys.stdin.fileno(), _check_stdin, loop, stop)
    return stop


def _check_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop.set()


async def _first(*waits: Awaitable[object]) -> int:
    """Index of the one that ends first; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks.index(next(iter(done)))
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
