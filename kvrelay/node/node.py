"""A node: one engine joined with one connector. The prefill and the decode service are built on it.

    engine thread --StepResult--> Node._on_result (loop) --> the service's own handler, first
                                                         --> event log (routers watch it)
                                                         --> publisher --> connector (peers fetch from it)

Invariant: the engine and the connector know nothing of each other; blocks pass between them only here and in
`Receiver`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kv_connector.base import KVConnector
from kvrelay.core.errors import NotTakenError, UnavailableError
from kvrelay.core.kv.block_hash import BlockHash, KVNamespace
from kvrelay.core.outages import Outages
from kvrelay.engine.engine import Engine
from kvrelay.engine.engine_thread import EngineThread
from kvrelay.engine.step_result import Reservation, StepResult
from kvrelay.node.absences import Absences
from kvrelay.node.activity import Activity
from kvrelay.node.event_log import EventLog
from kvrelay.node.fetches_under_way import FetchesUnderWay
from kvrelay.node.lease_counts import LeaseCounts
from kvrelay.node.prefill_rate import PrefillRate
from kvrelay.node.publisher import Notify, Publisher
from kvrelay.node.receiver import Receiver, ReceptionContext
from kvrelay.node.watchdog import EngineHungError, Watchdog

_logger = logging.getLogger(__name__)
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A node's description of itself; `epoch` is drawn at every start. `vocabulary` and `eos_token_ids`
    are those of `NodeDescription`."""

    node_id: str
    epoch: int
    kv_namespace: KVNamespace
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    vocabulary: bytes = b""


class MakeEngineThread(Protocol):
    """The constructor of EngineThread, or a function with its parameters."""

    def __call__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        *,
        on_result: Callable[[StepResult], None],
        on_crash: Callable[[BaseException], None],
    ) -> EngineThread: ...


def _ignore_progress(request_id: str, num_blocks: int, are_published: bool) -> None:
    """Does nothing: a node without PRODUCE requests makes no progress with them."""


class Node:
    """A node, used on the loop on which it was made. `fetch_timeout`: seconds that one fetch may take. `crashed` is set
    when a part that the node cannot do without has failed or hangs. `num_host_blocks`: the size of a pool in host
    memory, 0 for one on a GPU. `make_engine_thread` makes the thread that steps the engine."""

    def __init__(
        self,
        identity: NodeIdentity,
        engine: Engine,
        connector: KVConnector,
        *,
        fetch_timeout: float,
        prefill_rate: PrefillRate,
        num_host_blocks: int = 0,
        make_engine_thread: MakeEngineThread = EngineThread,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.identity = identity
        self.engine_config = engine.config
        self.core_table = engine.threads.core_table
        self.connector = connector
        self.num_host_blocks = num_host_blocks
        self.event_log = EventLog(engine.load())
        self.crashed: asyncio.Event = asyncio.Event()
        self.activity = Activity()
        self.lease_counts = LeaseCounts()
        self.draining = False
        self.engine_thread = make_engine_thread(engine, loop, on_result=self._on_result, on_crash=self.crash)
        self._outages = Outages(loop.time)
        self._publisher = Publisher(connector, self._unpin, self._outages)
        self._fetches = FetchesUnderWay(loop.time)
        self._reception = ReceptionContext(
            connector,
            self.engine_thread,
            self._fetches,
            Absences(loop.time),
            self._outages,
            block_size=engine.config.block_size,
            fetch_timeout=fetch_timeout,
            patience=2 * fetch_timeout,
            on_refused=self.event_log.append_refused,
        )
        self._watchdogs: list[Watchdog] = []
        self._hangs = False
        self._prefill_rate = prefill_rate
        self._handler: Callable[[StepResult], None] = lambda result: None
        self._on_progress: Callable[[str, int, bool], None] = _ignore_progress

    def start(
        self,
        handler: Callable[[StepResult], None],
        on_progress: Callable[[str, int, bool], None] = _ignore_progress,
    ) -> None:
        """Starts the engine. `handler` is called on the loop for each StepResult, `on_progress` with the id of a
        PRODUCE request, the number of its leading blocks that were offered to the connector, and whether they can be
        fetched."""
        self._handler = handler
        self._on_progress = on_progress
        self._publisher.start(self.crash)
        self.engine_thread.start()

    def watch(self, timeout: float) -> None:
        """Has the node count as crashed when its engine makes no turn for `timeout` seconds, or a fetch does not return
        so long after its time was over. Call once, after `start`."""
        self._watchdogs = [
            Watchdog(lambda: self.engine_thread.num_turns, EngineHungError, self.crash, timeout=timeout),
            Watchdog(self._fetches.sign_of_life, self._fetches.hung, self.crash, timeout=timeout),
        ]
        for watchdog in self._watchdogs:
            watchdog.start()

    def receiver(
        self,
        reservation: Reservation,
        *,
        on_missing: Callable[[int], None] = lambda num_tokens: None,
        ends_at: float | None,
    ) -> Receiver:
        """Returns the receiver of an admitted request, not running yet. Its parameters are those of `Receiver`."""
        return Receiver(self._reception, reservation, on_missing=on_missing, ends_at=ends_at)

    def discard(self, reservation: Reservation) -> None:
        """Unpins the blocks of a request that was admitted, but that nobody wants any more."""
        self._unpin([block.block_id for block in reservation.missing])

    def crash(self, error: BaseException) -> None:
        """Has the node count as crashed: a part that it cannot do without has failed or hangs."""
        _logger.critical("node %s does not work any more: %s", self.identity.node_id, error)
        self._hangs |= isinstance(error, EngineHungError)
        self.crashed.set()
        self.event_log.close()  # ends the streams of watchers at once

    async def check_idle(self) -> None:
        """Raises when anything is left of any request. For tests, and only on an idle node."""
        await self.all_published()
        await self.engine_thread.call(lambda engine: engine.check_idle())

    async def close(self) -> None:
        for watchdog in self._watchdogs:
            await watchdog.close()
        await self.engine_thread.stop(0.0 if self._hangs else _STOP_SECONDS)
        await self._publisher.close()
        await self.connector.close()

    async def drain(self) -> None:
        """Refuses new requests from now on; returns when those it has are over, no lease is left, and the store has
        been offered what they have computed, which the node's successor finds nowhere else."""
        self.draining = True
        self.event_log.touch()
        await self.activity.idle()
        await self.all_published()
        await self.connector.finish_storing()

    async def all_published(self) -> None:
        """Returns when the connector was offered everything that the engine has named so far, and told of all that it
        distrusts, but for what the leases of other requests still pin."""
        await self._flush()
        await self._flush()  # distrusted blocks that were being published are reported once they are unpinned

    def distrust(self, name: BlockHash) -> None:
        """Has nobody find a block any more, nor what was or will be computed behind it, here or in the store that nodes
        share, as far as this node has them."""
        self._outages.failed("sending KV", "others have refused a block of this node, which forgets it")
        self.engine_thread.post(lambda engine: engine.distrust(name))

    def require_accepting(self, epoch: int) -> None:
        """Raises NotTakenError unless this is the process of that `epoch`, whose description the router went by, and
        takes requests."""
        node_id = self.identity.node_id
        if epoch != self.identity.epoch:
            raise NotTakenError(f"{node_id} is another process than the one that was meant, of epoch {epoch:#x}")
        if self.crashed.is_set():
            raise NotTakenError(f"{node_id} has crashed")
        if self.draining:
            raise NotTakenError(f"{node_id} is draining")

    def require_alive(self) -> None:
        if self.crashed.is_set():
            raise UnavailableError(f"{self.identity.node_id} has crashed")

    async def _flush(self) -> None:
        """Returns when the publisher is done with what the engine has reported so far."""
        with suppress(UnavailableError):  # the engine has ended
            for _ in range(2):  # once the second is answered, the publisher has what messages before the first named
                await self.engine_thread.call(lambda engine: None)
        await self._publisher.drain()

    def _unpin(self, block_ids: Sequence[int]) -> None:
        self.engine_thread.post(lambda engine: engine.unpin(block_ids))

    def _on_result(self, result: StepResult) -> None:
        if self.crashed.is_set():
            return  # tokens of the result before this one may be lost
        try:
            self._take(result)
        except Exception as error:
            _logger.exception("the result of a step could not be handled")
            self.crash(error)

    def _take(self, result: StepResult) -> None:
        self._handler(result)  # first, because clients wait for its tokens; publishing takes time on this thread
        for failure in result.failures:
            _logger.error("request %s failed: %s", failure.request_id, failure.message)
        self._prefill_rate.observe(result.load)
        self.event_log.append(result.stored, result.removed, result.load)
        self._publisher.enqueue(result.named, [self._progress(*progress) for progress in result.progress])
        self._publisher.discard(result.distrusted)

    def _progress(self, request_id: str, num_blocks: int) -> Notify:
        return lambda are_published: self._on_progress(request_id, num_blocks, are_published)
