"""The segments of other nodes of this host that a connector has mapped, by endpoint.

A mapping keeps the memory of a node that has died, which its successor may need to start. So as long as anything is
mapped, the owners are checked, and the segments of dead ones unmapped.
Invariant: only the connector's own thread touches mapped memory; after `close` nothing is mapped.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from kv_connector.base import FetchOutcome
from kv_connector.header import Mismatch
from kv_connector.segments.segment import PeerSegment, sweep
from kv_connector.verdict import Verdict
from kv_connector.worker import RunsFunctions
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.source import KVSource
from kvrelay.core.outages import Outages
from kvrelay.core.tasks import begin_task, end_tasks

_CHECK_SECONDS = 1.0  # between two checks whether the owners live

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MappedPeer:
    """Another node as it is mapped here: its segment, and in a subclass its pool, where that is elsewhere."""

    segment: PeerSegment

    def close(self) -> None:
        self.segment.close()


PeerT = TypeVar("PeerT", bound=MappedPeer)


class MappedPeers(Generic[PeerT]):
    """The mapped peers. `open_peer`, called on the connector's `thread`, maps a peer or returns why it cannot."""

    def __init__(self, open_peer: Callable[[KVSource], PeerT | Verdict], thread: RunsFunctions) -> None:
        self._open_peer = open_peer
        self._thread = thread
        self._peers: dict[str, PeerT] = {}  # an endpoint names the epoch
        self._checking: asyncio.Task[None] | None = None

    def get(self, source: KVSource) -> PeerT | Verdict:
        """Returns the peer, mapped now if it was not, or why there is none. Called on the connector's thread."""
        self._forget_dead()
        if source.endpoint in self._peers:
            return self._peers[source.endpoint]
        opened = self._open_peer(source)
        if not isinstance(opened, FetchOutcome | Mismatch):
            self._peers[source.endpoint] = opened
        return opened

    def watch_owners(self) -> None:
        """Starts the checks, if anything is mapped. Called on the loop, after something may have been mapped."""
        if self._peers and (self._checking is None or self._checking.done()):
            self._checking = begin_task(self._check_owners(), name="kv segment owners")

    async def close(self) -> None:
        """Unmaps everything, after the copy under way."""
        await end_tasks(self._checking)
        await self._thread.run(self._forget)

    async def _check_owners(self) -> None:
        while self._peers:
            await asyncio.sleep(_CHECK_SECONDS)
            await self._thread.run(self._forget_dead)

    def _forget_dead(self) -> None:
        for endpoint in [endpoint for endpoint, peer in self._peers.items() if not peer.segment.owner_is_alive()]:
            self._peers.pop(endpoint).close()

    def _forget(self) -> None:
        while self._peers:
            self._peers.popitem()[1].close()


def open_segment(
    directory: Path, source: KVSource, outages: Outages, *, on_device: bool = False
) -> PeerSegment | Verdict:
    """Returns the segment of a living node, or why there is none."""
    name = f"the segment of node {source.node_id}"
    try:
        segment = PeerSegment(directory, source.endpoint, on_device=on_device)
    except FileNotFoundError as error:
        hint = "unless it has ended, let both see the same --shared-memory-dir"
        outages.failed(name, "node %s is on this host, but there is no %s: %s", source.node_id, error.filename, hint)
        return FetchOutcome.FAILED
    except (OSError, KVError) as error:
        outages.failed(name, "cannot use the segment of node %s: %s", source.node_id, error)
        return FetchOutcome.FAILED
    if segment.owner_is_alive():
        outages.succeeded(name)
        return segment
    segment.close()
    return FetchOutcome.FAILED


def sweep_and_log(directory: Path) -> None:
    """Removes the segments of dead nodes. Raises ConfigurationError when `directory` is not a directory."""
    if not directory.is_dir():
        raise ConfigurationError(f"--shared-memory-dir: {str(directory)!r} is not a directory")
    swept = sweep(directory)
    if swept:
        _logger.info("removed %d shared-memory segments of dead nodes from %s", swept, directory)
