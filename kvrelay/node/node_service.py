"""The `Node` gRPC service: who this node is, what it holds, how busy it is."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields
from typing import Any

import grpc

from kv_connector.stats import ConnectorStats
from kvrelay import __version__
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.kv_source import KVSource
from kvrelay.core.wire import namespace_to_wire, source_to_wire
from kvrelay.engine.request import EngineLoad
from kvrelay.node.event_log import EventLog, LogUpdate
from kvrelay.node.node import Node
from kvrelay.v1 import node_pb2, node_pb2_grpc

_WATCH_INTERVAL_SECONDS = 0.02  # changes within one interval travel in one message
_HEARTBEAT_SECONDS = 1.0  # a watcher that hears nothing for longer than a few of these may take the node for stopped
_NAMES_PER_MESSAGE = 16384  # a full snapshot is cut, so that no message comes near the size limit


class NodeService(node_pb2_grpc.NodeServicer):
    """Read-only views of a Node. `heartbeat` in seconds."""

    def __init__(
        self,
        node: Node,
        role: "node_pb2.NodeRole.ValueType",
        *,
        heartbeat: float = _HEARTBEAT_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._node = node
        self._role = role
        self._heartbeat = heartbeat
        self._clock = clock or MonotonicClock()

    async def Describe(
        self, request: node_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> node_pb2.DescribeResponse:
        self._node.require_alive()
        identity, config = self._node.identity, self._node.engine_config
        return node_pb2.DescribeResponse(
            role=self._role,
            source=source_to_wire(KVSource(identity.node_id, identity.epoch, self._node.connector.endpoint)),
            kv_namespace=namespace_to_wire(identity.kv_namespace),
            connector=self._node.connector.name,
            model=identity.model,
            max_model_len=config.max_model_len,
            num_blocks=self._node.event_log.load.num_blocks,
            block_bytes=identity.block_bytes,
            vocab_size=identity.vocab_size,
            version=__version__,
            max_num_seqs=config.max_num_seqs,
        )

    async def Watch(
        self, request: node_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[node_pb2.WatchResponse]:
        log = self._node.event_log
        epoch = self._node.identity.epoch
        sequence = request.after_sequence if request.epoch == epoch else None
        version = -1
        stats_due_at = self._clock.now()
        while not log.closed:
            version = await self._changed_or_due(log, version)
            update = log.since(sequence)
            sequence = update.sequence
            messages = _messages(epoch, update, draining=self._node.draining)
            if self._clock.now() >= stats_due_at:
                stats_due_at = self._clock.now() + self._heartbeat
                messages[-1].stats.CopyFrom(self._stats())
            for message in messages:
                yield message
            await asyncio.sleep(_WATCH_INTERVAL_SECONDS)

    async def _changed_or_due(self, log: EventLog, version: int) -> int:
        """As `EventLog.changed`, but returns after a heartbeat at the latest."""
        try:
            async with asyncio.timeout(self._heartbeat):
                return await log.changed(version)
        except TimeoutError:
            return version

    def _stats(self) -> node_pb2.NodeStats:
        counts = self._node.lease_counts
        return node_pb2.NodeStats(
            num_leases_released=counts.released,
            num_leases_expired=counts.expired,
            num_leases_ended_early=counts.ended_early,
            connectors=_connectors_to_wire(self._node.connector.all_stats()),
        )


def _messages(epoch: int, update: LogUpdate, *, draining: bool) -> list[node_pb2.WatchResponse]:
    """Cut into messages of bounded size; only the last one carries the sequence, so that a cut stream is replayed from
    before.
    """
    messages: list[node_pb2.WatchResponse] = []
    stored = list(update.stored)
    while len(stored) > _NAMES_PER_MESSAGE:
        part, stored = stored[:_NAMES_PER_MESSAGE], stored[_NAMES_PER_MESSAGE:]
        messages.append(node_pb2.WatchResponse(epoch=epoch, reset=update.reset and not messages, stored=part))
    messages.append(
        node_pb2.WatchResponse(
            epoch=epoch,
            sequence=update.sequence,
            reset=update.reset and not messages,
            stored=stored,
            removed=update.removed,
            load=_load_to_wire(update.load),
            draining=draining,
        )
    )
    return messages


def _load_to_wire(load: EngineLoad) -> node_pb2.NodeLoad:
    return node_pb2.NodeLoad(
        num_requests_running=load.num_requests_running,
        num_requests_decoding=load.num_requests_decoding,
        num_requests_waiting=load.num_requests_waiting,
        num_queued_tokens=load.num_queued_tokens,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        num_preemptions=load.num_preemptions,
        num_leases=load.num_leases,
        num_steps=load.num_steps,
        num_lent_steps=load.num_lent_steps,
    )


def _connectors_to_wire(all_stats: Mapping[str, ConnectorStats]) -> list[node_pb2.ConnectorStats]:
    names = [counter.name for counter in fields(ConnectorStats) if counter.name != "refused"]
    return [
        node_pb2.ConnectorStats(
            connector=connector,
            counters={name: getattr(stats, name) for name in names},
            refused={mismatch.value: count for mismatch, count in stats.refused.items()},
        )
        for connector, stats in all_stats.items()
    ]
