"""The process around a node: it loads the model, serves gRPC, announces that it is ready, and stops in order."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

import uvloop

from kvrelay.core.config import load_settings
from kvrelay.core.errors import KVRelayError
from kvrelay.core.lifecycle import StopSignals, announce_ready
from kvrelay.core.listening import check_port
from kvrelay.core.logs import configure_logging
from kvrelay.node.node import Node
from kvrelay.node.server import NodeServer, Service
from kvrelay.node.settings import NodeSettings
from kvrelay.node.startup import build_node

_logger = logging.getLogger(__name__)


def main(role: str, make_service: Callable[[Node], Service], argv: Sequence[str]) -> int:
    """Runs a node until it is told to stop; returns the exit status."""
    settings = load_settings(NodeSettings, argv, prog=f"kvrelay {role}")
    configure_logging(settings.node_id or role, settings.log_level)
    try:
        return uvloop.run(_serve(settings, role, make_service))
    except KVRelayError as error:
        _logger.critical("%s", error)
        return 1


async def _serve(settings: NodeSettings, role: str, make_service: Callable[[Node], Service]) -> int:
    signals = StopSignals(supervised=settings.supervised)
    check_port(settings.host, settings.port, flag="--port")  # before the model is loaded, which may take minutes
    node = await build_node(settings, role)
    server = NodeServer(node, make_service(node))
    try:
        port = await server.start(settings.host, settings.port)
        node.watch_steps(settings.step_timeout)
        address = f"{settings.host}:{port}"
        announce_ready(role=role, address=address, node_id=node.identity.node_id)
        _logger.info("%s is ready on %s", node.identity.node_id, address)
        crashed = await _first(signals.stop.wait(), node.crashed.wait()) == 1
        if not crashed:
            _logger.info("draining for at most %g s", settings.drain_timeout)
            await _first(server.drain(settings.drain_timeout), signals.hurry.wait())
    finally:
        await server.close()
    return 1 if crashed else 0


async def _first(*waits: Awaitable[object]) -> int:
    """Returns the index of the one that ends first, and cancels the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks.index(next(iter(done)))
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
