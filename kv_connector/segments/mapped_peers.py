"""The segments of other nodes of this host that a connector has mapped, by endpoint.

A mapping keeps the memory of a node that has died, which its successor may need to start: while there are any, their
owners are looked after. Invariant: only the connector's own thread touches what is mapped; after `close` nothing is.
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
from kvrelay.core.kv_source import KVSource
from kvrelay.core.tasks import end_tasks

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """What is mapped of another node: its segment. Where its pool is elsewhere, a subclass has that, too."""

    segment: PeerSegment

    def close(self) -> None:
        self.segment.close()


PeerT = TypeVar("PeerT", bound=Peer)


class MappedPeers(Generic[PeerT]):
    """`open_peer` maps a peer, or says why it cannot, on the connector's `thread`; `check_interval` is the seconds
    between two looks at owners."""

    def __init__(
        self, open_peer: Callable[[KVSource], PeerT | Verdict], thread: RunsFunctions, *, check_interval: float
    ) -> None:
        self._open_peer = open_peer
        self._thread = thread
        self._check_interval = check_interval
        self._peers: dict[str, PeerT] = {}  # an endpoint names the epoch
        self._looking: asyncio.Task[None] | None = None

    def of(self, source: KVSource) -> PeerT | Verdict:
        """On the connector's thread. A living one, mapped now if it was not."""
        self._forget_dead()
        if source.endpoint in self._peers:
            return self._peers[source.endpoint]
        opened = self._open_peer(source)
        if not isinstance(opened, FetchOutcome | Mismatch):
            self._peers[source.endpoint] = opened
        return opened

    def look_after_owners(self) -> None:
        """On the loop, after something may have been mapped."""
        if self._peers and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._look(), name="kv segment owners")

    async def close(self) -> None:
        """After whatever is being copied."""
        await end_tasks(self._looking)
        await self._thread.run(self._forget)

    async def _look(self) -> None:
        while self._peers:
            await asyncio.sleep(self._check_interval)
            await self._thread.run(self._forget_dead)

    def _forget_dead(self) -> None:
        for endpoint in [endpoint for endpoint, peer in self._peers.items() if not peer.segment.owner_is_alive()]:
            self._peers.pop(endpoint).close()

    def _forget(self) -> None:
        while self._peers:
            self._peers.popitem()[1].close()


def open_segment(directory: Path, source: KVSource, *, on_device: bool = False) -> PeerSegment | Verdict:
    """Of a living node, or why there is none."""
    try:
        segment = PeerSegment(directory, source.endpoint, on_device=on_device)
    except FileNotFoundError:
        return FetchOutcome.FAILED
    except (OSError, KVError) as error:
        _logger.warning("cannot use the segment of node %s: %s", source.node_id, error)
        return Mismatch.VERSION if isinstance(error, KVError) else FetchOutcome.FAILED
    if segment.owner_is_alive():
        return segment
    segment.close()
    return FetchOutcome.FAILED


def sweep_and_log(directory: Path) -> None:
    """Removes what dead nodes have left. Raises ConfigurationError when that is no directory."""
    if not directory.is_dir():
        raise ConfigurationError(f"shared_memory.directory {str(directory)!r} is not a directory")
    swept = sweep(directory)
    if swept:
        _logger.info("removed %d shared-memory segments of dead nodes from %s", swept, directory)
