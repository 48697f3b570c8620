"""What a node's leases and connector did since it started, as it told last. Counters only."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.v1 import node_pb2


@dataclass(frozen=True, slots=True)
class ConnectorCounters:
    """Of one backend. `counters` by name; `refused`: blocks that did not pass verification, by cause."""

    connector: str
    counters: Mapping[str, float]
    refused: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class NodeStats:
    num_leases_released: int = 0
    num_leases_expired: int = 0
    num_leases_ended_early: int = 0
    connectors: tuple[ConnectorCounters, ...] = ()


def stats_from_wire(message: node_pb2.NodeStats) -> NodeStats:
    return NodeStats(
        num_leases_released=message.num_leases_released,
        num_leases_expired=message.num_leases_expired,
        num_leases_ended_early=message.num_leases_ended_early,
        connectors=tuple(
            ConnectorCounters(entry.connector, dict(entry.counters), dict(entry.refused))
            for entry in message.connectors
        ),
    )
