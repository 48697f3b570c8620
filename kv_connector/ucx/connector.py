"""The connector for nodes on different hosts: a reader asks the holder by name, and UCX moves the blocks between pools.

Everything runs on the node's asyncio loop except `retract`, which the engine thread calls and which touches only the
table of published blocks. `protocol.py` has the messages, `auth.py` the proofs, `transport.py` UCX on the loop,
`holder.py` and `reader.py` the two sides.
Invariant: a peer that does not prove that it knows the cluster secret learns and gets nothing.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kv_connector.base import FetchOutcome, FetchOutcomes, PoolBuffer, WithoutStore
from kv_connector.device.pool import DevicePool
from kv_connector.header import Mismatch
from kv_connector.payloads import Payloads
from kv_connector.pool import LocalPool, slices
from kv_connector.settings import UcxSettings
from kv_connector.shared_pool import SharedPool
from kv_connector.stats import ConnectorStats
from kv_connector.ucx.auth import check_secret
from kv_connector.ucx.holder import Holder
from kv_connector.ucx.reader import LANES, Peer
from kv_connector.ucx.transport import Transport
from kv_connector.verdict import Verdict, Verdicts
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.kv.source_breakers import SourceBreakers
from kvrelay.core.outages import Outages
from kvrelay.core.tasks import uninterrupted

_WILDCARDS = ("", "0.0.0.0", "::", "*")  # noqa: S104
_MIN_CONCLUSIVE_TIMEOUT = 1.0  # seconds; running out of less time than that says nothing about the holder


@dataclass(slots=True)
class _Open:
    """The state between `allocate` or `serve` and `close`."""

    shared: SharedPool[Payloads]
    transport: Transport
    holder: Holder
    breakers: SourceBreakers  # of holders
    peers: dict[str, Peer] = field(default_factory=dict)  # by endpoint
    fetches: set["_Fetch"] = field(default_factory=set)  # under way
    leaving: set["asyncio.Task[None]"] = field(default_factory=set)  # peers that are being closed

    def peer(self, source: KVSource, key: bytes, stats: ConnectorStats) -> Peer:
        self._forget_deserted()
        peer = self.peers.get(source.endpoint)
        if peer is None:
            peer = self.peers[source.endpoint] = Peer(source.endpoint, self.transport, self.shared.pool, key, stats)
        return peer

    def _forget_deserted(self) -> None:
        """Closes, in the background, the peers to which no connection is left: a holder that restarts has another port.
        No fetch waits for that, since UCX may keep a buffer for long."""
        in_use = {fetch.peer for fetch in self.fetches}
        for endpoint, peer in list(self.peers.items()):
            if peer not in in_use and peer.is_deserted:
                del self.peers[endpoint]
                task = asyncio.get_running_loop().create_task(peer.close(), name="kv peer that is gone")
                self.leaving.add(task)
                task.add_done_callback(self.leaving.discard)


class UcxConnector(WithoutStore):
    """Implements HostConnector and DeviceConnector. `allocate` and `serve` are called on the running loop. The endpoint
    is "host:port" of the listener."""

    name = "ucx"

    def __init__(self, settings: UcxSettings, *, clock: Clock | None = None) -> None:
        """Raises ConfigurationError when the cluster secret or the host is not usable."""
        self.stats = ConnectorStats()
        self._settings = settings
        self._key = check_secret(settings.cluster_secret)
        if settings.host in _WILDCARDS:
            raise ConfigurationError(
                "connector 'ucx' needs the address under which other nodes reach this one: set --ucx-host"
            )
        if ":" in settings.host:
            raise ConfigurationError(
                f"connector 'ucx' cannot be reached at {settings.host}, an IPv6 address: set --ucx-host to a name or "
                "an IPv4 address of this node"
            )
        self._clock: Clock = clock or MonotonicClock()
        self._outages = Outages(self._clock.now)
        self._state: _Open | None = None

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        return {self.name: self.stats}

    def allocate(
        self, layout: KVLayout, num_blocks: int, *, node_id: str, epoch: int, buffer: PoolBuffer | None = None
    ) -> PoolBuffer:
        assert self._state is None, "allocate is called once"
        pool = LocalPool.over(buffer, layout, num_blocks)  # first: when there is no memory, there is nothing to close
        self._open(Transport(self._settings.net_devices), pool, epoch)
        return pool.buffer

    def serve(self, pool: DevicePool, *, node_id: str, epoch: int) -> None:
        assert self._state is None, "serve is called once"
        transport = Transport(self._settings.net_devices, on_device=True)
        if not transport.knows(pool.memory.kind):
            transport.close()
            raise ConfigurationError(
                f"this build of UCX does not move {pool.memory.kind} memory: install ucxx for its CUDA"
            )
        self._open(transport, pool, epoch)

    @property
    def endpoint(self) -> str:
        return f"{self._settings.host}:{self._require().holder.port}"

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        pool = self._require().shared.pool
        for part in slices(blocks, pool.block_bytes, pool.slice_bytes):
            shared = self._require().shared
            published = await shared.publish(part)
            self.stats.count_published(published, shared.pool.block_bytes)
            await asyncio.sleep(0)

    def retract(self, block_ids: Sequence[int]) -> None:
        state = self._state
        if state is not None:
            state.shared.remove(block_ids)

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        verdicts = Verdicts(len(blocks), timeout=timeout, clock=self._clock)
        verdicts.found += [FetchOutcome.MISSING if source is None else FetchOutcome.FAILED] * len(blocks)
        state = self._require()
        if source is not None and blocks and timeout > 0:
            await self._ask(state, source, blocks, verdicts.found, timeout)
        return verdicts.settle(source, self.stats, self._outages, block_bytes=state.shared.pool.block_bytes)

    async def close(self) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        state.shared.remove(range(state.shared.pool.num_blocks))  # at once: `retract` does nothing any more
        await uninterrupted(self._release(state))  # else another tier might give up the pool while UCX writes

    async def _release(self, state: _Open) -> None:
        """Ends everything that uses the pool, and then gives up the pool."""
        await asyncio.gather(*(fetch.expire() for fetch in state.fetches))
        await state.holder.close()
        for peer in state.peers.values():
            await peer.close()
        await asyncio.gather(*state.leaving)
        state.transport.close()
        state.shared.pool.release()

    async def _ask(
        self, state: _Open, source: KVSource, blocks: Sequence[NamedBlock], verdicts: list[Verdict], timeout: float
    ) -> None:
        """Fills in the verdicts, unless the holder has failed several times in a row: one that the network does not
        reach would otherwise cost every request a timeout."""
        permit = state.breakers.admit(source)
        if permit is None:
            self.stats.skipped += len(blocks)
            return
        peer = state.peer(source, self._key, self.stats)
        fetch = _Fetch(peer, source, blocks, verdicts, timeout, self._outages)
        num_answers = peer.num_answers
        state.fetches.add(fetch)
        try:
            await fetch.run()
        except BaseException:
            state.breakers.abandoned(source, permit)
            raise
        finally:
            state.fetches.discard(fetch)
        if fetch.answered:
            state.breakers.succeeded(source)
        elif peer.num_answers > num_answers or (fetch.expired and timeout < _MIN_CONCLUSIVE_TIMEOUT):
            state.breakers.abandoned(source, permit)  # it answers other fetches, or this one had too little time
        else:
            state.breakers.failed(source, permit)

    def _open(self, transport: Transport, pool: Payloads, epoch: int) -> None:
        shared = SharedPool(pool, epoch)
        holder = Holder(transport, shared, self._key, self.stats, self._outages)
        self._state = _Open(shared, transport, holder, SourceBreakers(self._clock))

    def _require(self) -> _Open:
        if self._state is None:
            raise KVError("the UCX connector is not allocated, or closed")
        return self._state


class _Fetch:
    """One call of `fetch`: its blocks in parts of one Ask each, which are sent over all lanes of the peer. `answered`:
    the holder has answered an Ask, whatever it said."""

    def __init__(
        self,
        peer: Peer,
        source: KVSource,
        blocks: Sequence[NamedBlock],
        verdicts: list[Verdict],
        timeout: float,
        outages: Outages,
    ) -> None:
        self.peer = peer
        self.answered = False
        self._outages = outages
        self._has_failed = False
        self._source = source
        self._blocks = blocks
        self._verdicts = verdicts  # one per block, FAILED until there is an answer
        self._parts: Iterator[int] = iter(range(0, len(blocks), peer.blocks_per_ask))
        self._deadline = asyncio.timeout(timeout)
        self._over = asyncio.Event()

    @property
    def expired(self) -> bool:
        """Tells whether the fetch has ended because its time was over."""
        return self._deadline.expired()

    async def expire(self) -> None:
        """Ends the fetch now; blocks that have not arrived are FAILED."""
        if not self._over.is_set():
            if not self._deadline.expired():
                self._deadline.reschedule(0.0)
            await self._over.wait()

    async def run(self) -> None:
        """Fills in the verdicts. When this has ended, cancelled or not, so have all tasks that it has started."""
        try:
            async with self._deadline:
                await self._ask_all()
        except TimeoutError:
            self._fail("node %s did not send all blocks in time", self._source.node_id)
        finally:
            self._over.set()
        if not self._has_failed:
            self._outages.succeeded(self._name)

    @property
    def _name(self) -> str:
        return f"fetching from node {self._source.node_id} over UCX"

    def _fail(self, message: str, *args: object) -> None:
        self._has_failed = True
        self._outages.failed(self._name, message, *args)

    async def _ask_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(LANES, -(-len(self._blocks) // self.peer.blocks_per_ask))):
                group.create_task(self._work())

    async def _work(self) -> None:
        for start in self._parts:
            part = self._blocks[start : start + self.peer.blocks_per_ask]
            try:
                answer = await self.peer.ask(self._source, part)
            except (KVError, TimeoutError, OSError) as error:
                self._fail("fetching from node %s failed: %s", self._source.node_id, str(error) or "no answer")
                return
            self.answered = True
            if isinstance(answer, Mismatch):
                self._verdicts[:] = [answer] * len(self._blocks)
                return
            self._verdicts[start : start + len(part)] = answer
