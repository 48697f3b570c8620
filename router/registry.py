"""The node table: a static list of addresses, each described, checked against the others, and watched for as long as we
run.

Invariant: all live nodes agree on whatever makes their KV comparable, and have different ids; what the index says of a
node belongs to the epoch in its description.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from random import Random, SystemRandom
from typing import cast

import grpc

from kvrelay.core.block_hash import BlockHash
from kvrelay.core.errors import ConfigurationError, KVRelayError, UnavailableError
from kvrelay.core.rpc import channel_options, error_from_rpc
from kvrelay.v1 import node_pb2, node_pb2_grpc
from router.backoff import Backoff
from router.kv_index import KVIndex
from router.node import (
    NodeDescription,
    NodeHandle,
    NodeLoad,
    NodeRole,
    NodeState,
    description_from_wire,
    load_from_wire,
)
from router.request import ServedModel

_logger = logging.getLogger(__name__)


class NodeRefusedError(ConfigurationError):
    """A node that does not fit the others; the message says in what."""


class Registry:
    """`start`, then read `live` and `served_model`; one task per address keeps them true. `timeout`: of one question,
    in seconds. `connect` opens the channel to an address, `random` spreads its attempts."""

    def __init__(
        self,
        prefill_nodes: Sequence[str],
        decode_nodes: Sequence[str],
        index: KVIndex,
        *,
        timeout: float = 5.0,
        connect: Callable[[str], grpc.aio.Channel] | None = None,
        random: Random | None = None,
    ) -> None:
        addresses = (*prefill_nodes, *decode_nodes)
        if len(set(addresses)) < len(addresses):
            raise ConfigurationError("an address is listed twice among --prefill-nodes and --decode-nodes")
        self.index = index
        connect = connect or _connect
        self.prefill = tuple(NodeHandle(address, NodeRole.PREFILL, connect(address)) for address in prefill_nodes)
        self.decode = tuple(NodeHandle(address, NodeRole.DECODE, connect(address)) for address in decode_nodes)
        self._timeout = timeout
        self._random = random or SystemRandom()
        self._tasks: list[asyncio.Task[None]] = []
        self._settled = {address: asyncio.Event() for address in addresses}

    @property
    def nodes(self) -> tuple[NodeHandle, ...]:
        return (*self.prefill, *self.decode)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(node), name=f"watch {node.address}") for node in self.nodes]

    async def wait_settled(self, timeout: float) -> bool:
        """Whether every node is live or refused within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                for event in self._settled.values():
                    await event.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self.nodes:
            await node.channel.close()

    def live(self, role: NodeRole) -> list[NodeHandle]:
        """In the order of the list they came from."""
        nodes = self.prefill if role is NodeRole.PREFILL else self.decode
        return [node for node in nodes if node.state is NodeState.LIVE]

    def served_model(self) -> ServedModel:
        """What every live node can serve. Raises UnavailableError while no decode node lives."""
        decode = _descriptions(self.live(NodeRole.DECODE))
        if not decode:
            states = ", ".join(f"{node.address} is {node.state.value}" for node in self.decode) or "none is configured"
            raise UnavailableError(f"no decode node can serve now: {states}")
        descriptions = [*decode, *_descriptions(self.live(NodeRole.PREFILL))]
        return ServedModel(
            max_model_len=min(description.max_model_len for description in descriptions),
            vocab_size=decode[0].vocab_size,
            kv_namespace=decode[0].kv_namespace,
        )

    async def _follow(self, node: NodeHandle) -> None:
        """Connect, watch, connect again, for ever."""
        backoff, complaint = Backoff(self._random), ""
        while True:
            try:
                await self._describe(node)
                await self._watch(node)
                error: KVRelayError = UnavailableError("it has closed the connection")
            except NodeRefusedError as refusal:
                node.state = NodeState.REFUSED
                self._settled[node.address].set()
                error = refusal
            except UnavailableError as unusable:
                error = unusable
            except grpc.aio.AioRpcError as failure:
                error = error_from_rpc(failure)
            if node.state in (NodeState.LIVE, NodeState.DRAINING):
                node.state = NodeState.LOST
                backoff.reset()
                complaint = ""
            if str(error) != complaint:  # once, not at every attempt
                complaint = str(error)
                _logger.warning("%s node %s is %s: %s", node.role.value, node.name, node.state.value, error)
            await asyncio.sleep(backoff.next())

    async def _describe(self, node: NodeHandle) -> None:
        """Raises NodeRefusedError when the node does not fit, AioRpcError when it does not answer."""
        stub = _stub(node)
        description = description_from_wire(await stub.Describe(node_pb2.DescribeRequest(), timeout=self._timeout))
        self._check(node, description)
        known = node.description
        if known is not None and known.source != description.source:
            self.index.drop(known.source.node_id)
            node.load, node.watched = NodeLoad(), None
        node.description = description
        _logger.info("%s node %s is connected", node.role.value, node.name)  # live when its first load has come

    def _check(self, node: NodeHandle, description: NodeDescription) -> None:
        if description.role is not node.role:
            found = "unknown" if description.role is None else description.role.value
            raise NodeRefusedError(f"role is {found}, but it is listed among the {node.role.value} nodes")
        for other in self.nodes:
            if other is node or other.state is not NodeState.LIVE or other.description is None:
                continue
            if other.description.source.node_id == description.source.node_id:
                raise NodeRefusedError(f"node_id {description.source.node_id!r} is that of {other.address} already")
            if difference := _difference(description, other.description):
                raise NodeRefusedError(f"{difference} (as {other.name} has it)")

    async def _watch(self, node: NodeHandle) -> None:
        """Until the stream ends. Only its first message has a deadline: an idle node has nothing to say, and a dead
        connection is found by gRPC's keepalive."""
        assert node.description is not None
        epoch, sequence = node.watched or (0, 0)
        call = _stub(node).Watch(node_pb2.WatchRequest(epoch=epoch, after_sequence=sequence))
        try:
            async with asyncio.timeout(self._timeout) as first:
                async for message in call:
                    first.reschedule(None)
                    self._apply(node, message)
        except TimeoutError as error:
            raise UnavailableError("it does not report its state") from error
        finally:
            call.cancel()

    def _apply(self, node: NodeHandle, message: node_pb2.WatchResponse) -> None:
        assert node.description is not None
        source = node.description.source
        if message.epoch != source.epoch:
            raise UnavailableError(f"it was restarted: epoch {message.epoch:#x} after {source.epoch:#x}")
        if node.state not in (NodeState.LIVE, NodeState.DRAINING):
            self._check(node, node.description)  # another one may have become live since this one was described
        if message.reset:
            self.index.drop(source.node_id)
            node.watched = None  # a snapshot that breaks off is asked for again from its beginning
        self.index.removed(source.node_id, [BlockHash(name) for name in message.removed])
        self.index.stored(source.node_id, [BlockHash(name) for name in message.stored])
        if message.HasField("load"):  # the last message of an update
            node.watched = (message.epoch, message.sequence)
            node.load = load_from_wire(message.load)
            self._enter(node, NodeState.DRAINING if message.draining else NodeState.LIVE)

    def _enter(self, node: NodeHandle, state: NodeState) -> None:
        """What the node says of itself, once it fits the others."""
        if node.state is not state:
            node.state = state
            self._settled[node.address].set()
            _logger.info("%s node %s is %s", node.role.value, node.name, state.value)


def _connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options())


def _stub(node: NodeHandle) -> "node_pb2_grpc.NodeAsyncStub":
    return cast("node_pb2_grpc.NodeAsyncStub", node_pb2_grpc.NodeStub(node.channel))


def _descriptions(nodes: Sequence[NodeHandle]) -> list[NodeDescription]:
    return [node.description for node in nodes if node.description is not None]


def _difference(found: NodeDescription, expected: NodeDescription) -> str | None:
    """The first thing in which two nodes differ so that they can not exchange KV, with both values; None when they
    can."""
    ours, theirs = found.kv_namespace, expected.kv_namespace
    fields: tuple[tuple[str, object, object], ...] = (
        ("KV dtype", ours.kv_dtype, theirs.kv_dtype),  # before the fingerprint, which depends on it and explains less
        ("model fingerprint", ours.model_fingerprint.hex()[:16], theirs.model_fingerprint.hex()[:16]),
        ("block size", ours.block_size, theirs.block_size),
        ("KV layout", ours.layout_id, theirs.layout_id),
        ("connector", found.connector, expected.connector),
        ("vocabulary size", found.vocab_size, expected.vocab_size),
    )
    return next((f"{name} is {one}, not {other}" for name, one, other in fields if one != other), None)
