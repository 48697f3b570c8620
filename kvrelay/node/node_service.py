"""The gRPC service `Node`: it tells routers who this node is, what it holds, and how busy it is, and hears from them
which of its blocks may be damaged."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import fields
from itertools import starmap

from kv_connector.stats import ConnectorStats
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import ConnectorCounters, NodeDescription, NodeRole, NodeStats
from kvrelay.core.rpc.calls import Context
from kvrelay.core.rpc.wire import description_to_wire, load_to_wire, refused_to_wire, stats_to_wire
from kvrelay.node.event_log import EventLog, LogUpdate
from kvrelay.node.node import Node
from kvrelay.v1 import node_pb2, node_pb2_grpc

# Changes of blocks and load within one interval are sent in one message. A router hears so often of each busy node.
_WATCH_INTERVAL_SECONDS = 0.05
_HEARTBEAT_SECONDS = 1.0  # a watcher may count the node as stopped after several of these without a message
_NAMES_PER_MESSAGE = 16384  # gained, and as many lost: a router handles each message at once


class NodeService(node_pb2_grpc.NodeServicer):
    """The service of one node. `heartbeat`: most seconds between two messages to a watcher."""

    def __init__(
        self,
        node: Node,
        role: NodeRole,
        *,
        heartbeat: float = _HEARTBEAT_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._node = node
        self._role = role
        self._heartbeat = heartbeat
        self._clock = clock or MonotonicClock()

    async def Describe(self, request: node_pb2.DescribeRequest, context: Context) -> node_pb2.DescribeResponse:
        self._node.require_alive()
        identity, config = self._node.identity, self._node.engine_config
        description = NodeDescription(
            role=self._role,
            source=KVSource(identity.node_id, identity.epoch, self._node.connector.endpoint),
            kv_namespace=identity.kv_namespace,
            connector=self._node.connector.name,
            max_model_len=config.max_model_len,
            vocab_size=identity.vocab_size,
            max_num_seqs=config.max_num_seqs,
            vocabulary=identity.vocabulary,
            core_table=self._node.core_table,
            eos_token_ids=identity.eos_token_ids,
        )
        return description_to_wire(description)

    async def Watch(self, request: node_pb2.WatchRequest, context: Context) -> AsyncIterator[node_pb2.WatchResponse]:
        log = self._node.event_log
        epoch = self._node.identity.epoch
        sequence = request.after_sequence if request.epoch == epoch else None
        version = -1
        stats_due_at = self._clock.now()
        said_draining = False
        while not log.closed or self._node.draining != said_draining:  # else routers blame its requests for its end
            version = await self._changed_or_due(log, version)
            update = log.since(sequence)
            sequence = update.sequence
            said_draining = self._node.draining
            messages = _messages(epoch, update, draining=said_draining)
            if self._clock.now() >= stats_due_at:
                stats_due_at = self._clock.now() + self._heartbeat
                messages[-1].stats.CopyFrom(stats_to_wire(self._stats()))
            for message in messages:
                yield message
            with suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_INTERVAL_SECONDS):
                    await log.touched(version)

    async def Distrust(self, request: node_pb2.DistrustRequest, context: Context) -> node_pb2.DistrustResponse:
        if request.epoch == self._node.identity.epoch:
            self._node.distrust(BlockHash(request.name))
        return node_pb2.DistrustResponse()

    async def _changed_or_due(self, log: EventLog, version: int) -> int:
        """Waits as `EventLog.changed` does, but at most for a heartbeat. Returns the version now."""
        try:
            async with asyncio.timeout(self._heartbeat):
                return await log.changed(version)
        except TimeoutError:
            return version

    def _stats(self) -> NodeStats:
        counts = self._node.lease_counts
        return NodeStats(
            num_leases_released=counts.released,
            num_leases_expired=counts.expired,
            num_leases_ended_early=counts.ended_early,
            connectors=tuple(starmap(_connector_counters, self._node.connector.all_stats().items())),
        )


def _messages(epoch: int, update: LogUpdate, *, draining: bool) -> list[node_pb2.WatchResponse]:
    """Splits an update into messages of bounded size. Only the last one has the sequence number: if the stream breaks
    before it, the whole update is sent again.
    """
    num_names = max(len(update.stored), len(update.removed))
    messages = [
        node_pb2.WatchResponse(
            epoch=epoch,
            reset=update.reset and begin == 0,
            stored=update.stored[begin : begin + _NAMES_PER_MESSAGE],
            removed=update.removed[begin : begin + _NAMES_PER_MESSAGE],
        )
        for begin in range(0, max(1, num_names), _NAMES_PER_MESSAGE)
    ]
    last = messages[-1]
    last.refused.extend(map(refused_to_wire, update.refused))
    last.sequence, last.draining = update.sequence, draining
    last.load.CopyFrom(load_to_wire(update.load))
    return messages


def _connector_counters(connector: str, stats: ConnectorStats) -> ConnectorCounters:
    names = [counter.name for counter in fields(ConnectorStats) if counter.name != "refused"]
    return ConnectorCounters(
        connector,
        counters={name: getattr(stats, name) for name in names},
        refused={mismatch.value: count for mismatch, count in stats.refused.items()},
    )
