"""The node table: a static list of addresses. Each node is described, checked against the others, and watched while the
router runs.

The states of a node and what changes them:

    connecting ─► live ◄─► draining      described, fits, and sends; `draining` as long as the node says so
    connecting, lost ─► refused ─► live  does not fit the others; asked again until it does
    refused ─► lost                      cannot be reached any more
    live, draining ─► lost ─► live       its stream broke, or nothing came for `silence` seconds; asked again
    live ◄─► ejected                     its requests failed (`outlier.py`); never the last live node of its role.
                                         `is_ejected` tells; the handle says `live`

Invariant: all live nodes agree in everything that makes their KV comparable, and have different ids. What the index
says of a node belongs to the epoch in its description. When a node is lost, whatever waits for it fails at once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from random import Random, SystemRandom
from typing import cast

import grpc

from kvrelay.core.backoff import Backoff
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import KVRelayError, UnavailableError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import NodeDescription, NodeLoad, NodeRole, NodeStats
from kvrelay.core.outages import Outages
from kvrelay.core.rpc.connections import RECONNECT_SECONDS, SMALL_WINDOW, channel_options, understood
from kvrelay.core.rpc.wire import description_from_wire, load_from_wire, refused_from_wire, stats_from_wire
from kvrelay.core.tasks import begin_task, end_tasks
from kvrelay.v1 import node_pb2, node_pb2_grpc
from router.nodes.agreement import misfit
from router.nodes.complaint import complaint
from router.nodes.doubts import Doubts
from router.nodes.fit import NodeRefusedError, check_fit
from router.nodes.kv_index import KVIndex
from router.nodes.links import Links
from router.nodes.node import NodeHandle, NodeState
from router.nodes.outlier import Outlier
from router.nodes.silence import Silence
from router.request import ServedModel

_logger = logging.getLogger(__name__)


class Registry:
    """The table. After `start`, one task per address keeps it up to date; `live` and `served_model` read it.

    `timeout`: seconds that a node may take to describe itself. `silence`: seconds without a message after which a node
    is lost. `vocabulary`: the digest of the router's own vocabulary, nothing if it is not known. `changed` is set
    whenever a node's state changes. `connect` opens the channel to an address; `random` spreads the attempts."""

    def __init__(
        self,
        prefill_nodes: Sequence[str],
        decode_nodes: Sequence[str],
        index: KVIndex,
        *,
        timeout: float,
        silence: float,
        vocabulary: bytes = b"",
        clock: Clock | None = None,
        connect: Callable[[str], grpc.aio.Channel] | None = None,
        random: Random | None = None,
    ) -> None:
        addresses = (*prefill_nodes, *decode_nodes)
        assert len(set(addresses)) == len(addresses)  # the settings see to it
        self.index = index
        self.clock = clock or MonotonicClock()
        self._random = random or SystemRandom()
        self._connect = connect or partial(_connect, silence)
        self._vocabulary = vocabulary
        self.prefill = tuple(self._handle(address, NodeRole.PREFILL) for address in prefill_nodes)
        self.decode = tuple(self._handle(address, NodeRole.DECODE) for address in decode_nodes)
        self.changed = asyncio.Event()
        self._timeout = timeout
        self._silence = silence
        self._tasks: list[asyncio.Task[None]] = []
        self._doubts = Doubts(timeout=timeout)
        self._settled: set[str] = set()  # addresses of nodes that were live, draining or refused
        self._has_settled = asyncio.Event()
        self._tried = {address: asyncio.Event() for address in addresses}
        self._max_model_len = 0  # what the log has said last

    @property
    def nodes(self) -> tuple[NodeHandle, ...]:
        return (*self.prefill, *self.decode)

    def _handle(self, address: str, role: NodeRole) -> NodeHandle:
        outlier = Outlier(f"{role.value} node {address}", self.clock, self._random)
        links = Links(self.clock, self._random)
        return NodeHandle(address, role, self._connect(address), outlier, Outages(self.clock.now), links)

    def start(self) -> None:
        self._tasks = [begin_task(self._follow(node), name=f"watch {node.address}") for node in self.nodes]

    async def wait_settled(self) -> None:
        """Returns when every node has been live, draining or refused, or when one that can serve is live and those that
        are missing could not be reached."""
        await self._has_settled.wait()

    async def close(self) -> None:
        await end_tasks(*self._tasks)
        await self._doubts.close()
        for node in self.nodes:
            await node.channel.close()

    def live(
        self, role: NodeRole, suits: Callable[[NodeDescription], bool] = lambda description: True
    ) -> list[NodeHandle]:
        """Returns the nodes that may get a request now, of those that `suits` accepts, in the order in which they are
        listed: the live ones without those that are ejected or were given one on probation just now. If there are no
        others, those on probation come before the ejected ones."""
        nodes = self.prefill if role is NodeRole.PREFILL else self.decode
        live = [
            node
            for node in nodes
            if node.state is NodeState.LIVE and node.description is not None and suits(node.description)
        ]
        admitting = [node for node in live if node.outlier.admits]
        return admitting or [node for node in live if not node.outlier.is_ejected] or live

    def is_ejected(self, node: NodeHandle) -> bool:
        """Tells whether the node gets no requests although it is live."""
        return node.state is NodeState.LIVE and node.outlier.is_ejected and node not in self.live(node.role)

    def is_live(self, node: KVSource) -> bool:
        """Tells whether a node can be used now, and not another process at its address."""
        return any(known.state is NodeState.LIVE and known.source == node for known in self.nodes)

    def has_ended(self, node: KVSource) -> bool:
        """Tells whether a node is known to have ended, because another process is at its address."""
        known = (handle.description for handle in self.nodes)
        return all(description is None or description.source != node for description in known)

    def has_drained(self, node: KVSource) -> bool:
        """Tells whether a node is known to have drained, so that no request has ended it."""
        return any(known.drained == node for known in self.nodes)

    def can_serve(self) -> bool:
        return bool(self.live(NodeRole.DECODE))

    def check_can_serve(self) -> None:
        """Raises UnavailableError, which has the state of each decode node and the reason, while none is live."""
        if not self.can_serve():
            states = "; ".join(map(_state_with_reason, self.decode)) or "none is configured"
            raise UnavailableError(f"no decode node can serve now: {states}")

    def served_model(self) -> ServedModel:
        """Returns what every live node can serve. Raises UnavailableError while no decode node is live."""
        self.check_can_serve()
        decode = _descriptions(self.live(NodeRole.DECODE))
        descriptions = [*decode, *_descriptions(self.live(NodeRole.PREFILL))]
        return ServedModel(
            max_model_len=min(description.max_model_len for description in descriptions),
            max_num_seqs=min(description.max_num_seqs for description in descriptions),
            vocab_size=decode[0].vocab_size,
            kv_namespace=decode[0].kv_namespace,
        )

    async def _follow(self, node: NodeHandle) -> None:
        """Connects to a node and watches it, again and again."""
        backoff = Backoff(longest=RECONNECT_SECONDS, random=self._random)
        while True:
            try:
                await self._describe(node)
                await self._watch(node)
                error: KVRelayError = UnavailableError("it has closed the connection")
            except NodeRefusedError as refusal:
                self._set_state(node, NodeState.REFUSED)
                error = refusal
            except UnavailableError as unusable:
                error = unusable
            except grpc.aio.AioRpcError as failure:
                error = UnavailableError(complaint(failure, node.address, timeout=self._timeout))
            except Exception:
                _logger.exception("watching %s has failed", node.name)
                error = UnavailableError("internal error of the router")
            if node.is_watched:
                self._set_state(node, NodeState.LOST)
                node.on_lost(UnavailableError(f"{node.role.value} node {node.name} is lost: {error}"))
                backoff.reset()
            elif node.state is NodeState.REFUSED and not isinstance(error, NodeRefusedError):
                self._set_state(node, NodeState.LOST)  # what did not fit is not there any more
            node.complaint = str(error)
            self._check_settled()
            if node.complaint not in node.logged:  # a name with two addresses fails with two messages in turn
                node.logged.add(node.complaint)
                _logger.warning("%s node %s", node.role.value, _state_with_reason(node))
            await asyncio.sleep(backoff.next())

    async def _describe(self, node: NodeHandle) -> None:
        """Asks a node for its description. Raises NodeRefusedError if it does not fit the others, AioRpcError if it
        does not answer."""
        stub = _stub(node)
        try:
            answer = understood(await stub.Describe(node_pb2.DescribeRequest(), timeout=self._timeout))
            description = description_from_wire(answer)
            node.heard_at = self.clock.now()
            known, node.description = node.description, description
            node.misfit = misfit(description, node.role, self._vocabulary)
        finally:
            self._tried[node.address].set()
        if known is not None and known.source != description.source:
            if not self._belongs_to_another(node, known.source.node_id):
                self._forget_blocks(known.source.node_id)
            node.reported(NodeLoad())
            node.stats, node.watched = NodeStats(), None
            node.outages, node.links = Outages(self.clock.now), Links(self.clock, self._random)
        for tried in self._tried.values():  # so that it does not matter who answers first
            await tried.wait()
        check_fit(node, self.nodes, now=self.clock.now())
        _logger.info("%s node %s is connected", node.role.value, node.name)  # live when its first load has come

    def _belongs_to_another(self, node: NodeHandle, node_id: str) -> bool:
        """Tells whether what the index says of `node_id` is of another node than this one, which was refused for having
        the same id."""
        others = [other for other in self.nodes if other is not node and other.is_watched]
        return any(description.source.node_id == node_id for description in _descriptions(others))

    def _forget_blocks(self, node_id: str) -> None:
        """Forgets what the index says of `node_id`. Whoever has the id is asked for all its blocks when it is watched
        again, also one that comes back after another has had its id."""
        self.index.drop(node_id)
        for node in self.nodes:
            if node.description is not None and node.description.source.node_id == node_id:
                node.watched = None

    async def _watch(self, node: NodeHandle) -> None:
        """Takes a node's messages, of which it sends at least one a second, until the stream ends. Raises
        UnavailableError if it falls silent."""
        epoch, sequence = node.watched or (0, 0)
        call = _stub(node).Watch(node_pb2.WatchRequest(epoch=epoch, after_sequence=sequence))
        try:
            async with Silence(self._silence) as silence:
                async for message in call:
                    silence.broken()
                    node.heard_at = self.clock.now()
                    self._apply(node, understood(message))
        except TimeoutError as error:
            raise UnavailableError(f"nothing was heard of it for {self._silence:g} seconds") from error
        finally:
            call.cancel()

    def _apply(self, node: NodeHandle, message: node_pb2.WatchResponse) -> None:
        source = node.source
        if message.epoch != source.epoch:
            raise UnavailableError(f"it was restarted: epoch {message.epoch:#x} after {source.epoch:#x}")
        if not node.is_watched:
            # Another node may have become live since this one was described.
            check_fit(node, self.nodes, now=self.clock.now())
        if message.reset:
            self._forget_blocks(source.node_id)  # if the stream breaks within the snapshot, it is asked for again
        self.index.removed(source.node_id, [BlockHash(name) for name in message.removed])
        self.index.stored(source.node_id, [BlockHash(name) for name in message.stored])
        for refused in message.refused:
            self._doubts.tell(refused_from_wire(refused), self.nodes)
        if message.HasField("load"):  # the last message of an update
            node.watched = (message.epoch, message.sequence)
            node.reported(load_from_wire(message.load))
            if message.HasField("stats"):
                node.stats = stats_from_wire(message.stats)
            self._enter(node, NodeState.DRAINING if message.draining else NodeState.LIVE)

    def _enter(self, node: NodeHandle, state: NodeState) -> None:
        """Makes a node that fits the others live or draining, as it says."""
        if node.state is state:
            return
        if node.state is not NodeState.DRAINING:
            node.outlier.reset()
        self._set_state(node, state)
        _logger.info("%s node %s is %s", node.role.value, node.name, state.value)
        if state is NodeState.LIVE:
            node.on_live()

    def _set_state(self, node: NodeHandle, state: NodeState) -> None:
        if node.state is not state:
            node.state = state
            if state is NodeState.DRAINING:  # what is under way there learns only later that it is lost
                node.drained = node.source
            node.complaint = ""
            node.logged.clear()
            self.changed.set()
            self._log_limit()
        self._settled.add(node.address)
        self._check_settled()

    def _log_limit(self) -> None:
        """Logs how long requests may be, if that has changed, and which of the live nodes allows no more."""
        if not self.can_serve():
            return
        live = [node for node in self.nodes if node.state is NodeState.LIVE]
        shortest = min(live, key=lambda node: node.described.max_model_len)
        limit = shortest.described.max_model_len
        if limit != self._max_model_len:
            self._max_model_len = limit
            _logger.info("requests may have %d tokens now, prompt included: %s takes no more", limit, shortest.name)

    def _check_settled(self) -> None:
        can_serve = self.can_serve()
        if all(node.address in self._settled or (can_serve and node.complaint) for node in self.nodes):
            self._has_settled.set()


def _state_with_reason(node: NodeHandle) -> str:
    return f"{node.name} is {node.state.value}" + (f": {node.complaint}" if node.complaint else "")


def _connect(silence: float, address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options(silence=silence, window=SMALL_WINDOW))


def _stub(node: NodeHandle) -> "node_pb2_grpc.NodeAsyncStub":
    return cast("node_pb2_grpc.NodeAsyncStub", node_pb2_grpc.NodeStub(node.channel))


def _descriptions(nodes: Sequence[NodeHandle]) -> list[NodeDescription]:
    return [node.description for node in nodes if node.description is not None]
