"""The process around a node: it loads the model, serves gRPC, announces that it is ready, and stops in order.

Invariant: it announces nothing after it was told to stop.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvloop

from kvrelay.core.errors import KVRelayError
from kvrelay.core.node_report import NodeRole
from kvrelay.core.process.lifecycle import StopSignals, announce_ready
from kvrelay.core.process.listening import address_of, check_port, is_loopback, numeric_address
from kvrelay.core.process.logs import configure_logging
from kvrelay.core.tasks import first_of
from kvrelay.node.node import Node
from kvrelay.node.server import NodeServer, Service
from kvrelay.node.settings import NodeSettings
from kvrelay.node.startup import build_node

_logger = logging.getLogger(__name__)
_CLOSE_SECONDS = 30.0  # far more than closing takes unless something hangs


class _ThreadLeftError(Exception):
    """All is closed, but a thread still loads the model or computes a step. The process has to end with `status` all
    the same, without Python's own end, which would wait for such a thread or crash under it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def main(service: type[Service], settings: NodeSettings) -> int:
    """Runs a node with this service until it is told to stop; returns the exit status."""
    configure_logging(settings.node_id or service.role.value, settings.log_level)
    try:
        with _exit_timer() as end_soon:
            return uvloop.run(_run(settings, service, end_soon))
    except _ThreadLeftError as left:
        _logger.info("%s", left)
        os._exit(left.status)


async def _run(settings: NodeSettings, service: type[Service], end_soon: Callable[[], None]) -> int:
    """Serves, and logs why that ends: here, since a transfer that hangs may keep the loop from its end, for as long as
    `end_soon` lets it."""
    try:
        return await _serve(settings, service)
    except KVRelayError as error:
        _logger.critical("%s", error)
        return 1
    finally:
        end_soon()


async def _serve(settings: NodeSettings, service: type[Service]) -> int:
    signals = StopSignals(supervised=settings.supervised)
    check_port(settings.host, settings.port, flag="--port")  # before the model is loaded, which may take minutes
    numeric = numeric_address(settings.host)
    if is_loopback(numeric) and not is_loopback(settings.host):
        _logger.warning("--host: `%s` is a loopback address here: only this machine reaches it", settings.host)
    node = await _build_unless_stopped(settings, service.role, signals.stop)
    server = NodeServer(node, service(node))
    crashed = False
    try:
        port = await server.start(settings.host, settings.port)
        node.watch(settings.step_timeout)
        address = address_of(settings.host, port)
        if not signals.stop.is_set():
            pool = {"num_host_blocks": node.num_host_blocks} if node.num_host_blocks else {}
            announce_ready(role=service.role.value, address=address, node_id=node.identity.node_id, **pool)
            known_by = "" if numeric == settings.host else f" ({numeric})"
            _logger.info("%s is ready on %s%s", node.identity.node_id, address, known_by)
        crashed = await first_of(signals.stop.wait(), node.crashed.wait()) == 1
        if not crashed:
            _logger.info("draining for at most %g s", settings.drain_timeout)
            draining = server.drain(settings.drain_timeout)
            crashed = await first_of(draining, signals.hurry.wait(), node.crashed.wait()) == 2
    finally:
        with _exit_timer() as end_soon:
            end_soon()
            await server.close()
    status = 1 if crashed else 0
    if node.engine_thread.is_alive:
        raise _ThreadLeftError("ended in the middle of a step", status)
    return status


@contextmanager
def _exit_timer() -> Iterator[Callable[[], None]]:
    """A context with a function after which the process ends with status 1 if the context is still open in half a
    minute. A device that hangs returns from nothing that it was given, and closing waits for it, on the loop, too."""

    def give_up() -> None:
        _logger.critical("ended without closing: a device or a transfer does not let go")
        os._exit(1)

    timer = threading.Timer(_CLOSE_SECONDS, give_up)
    timer.daemon = True
    try:
        yield timer.start
    finally:
        timer.cancel()


async def _build_unless_stopped(settings: NodeSettings, role: NodeRole, stop: asyncio.Event) -> Node:
    """Returns the node, or raises _ThreadLeftError when `stop` is set first."""
    building = asyncio.create_task(build_node(settings, role))
    await first_of(building, stop.wait())
    if building.cancelled():
        raise _ThreadLeftError("stopped while loading", 0)
    return building.result()
