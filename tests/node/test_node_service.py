"""A watcher gets a message at least once per heartbeat, with the counters of the connector and the leases."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from decode_node.service import DecodeService
from kv_connector.header import Mismatch
from kvrelay.core.node_report import NodeRole
from kvrelay.node.node_service import NodeService
from kvrelay.v1 import node_pb2
from tests.node.fake_node import make_node, serving

PATIENCE = 10.0


async def test_an_idle_node_sends_one_message_per_heartbeat() -> None:
    node = make_node()
    node.connector.stats.refused[Mismatch.DIGEST] = 2
    node.connector.stats.bytes_fetched = 4096
    node.lease_counts.expired = 3
    async with serving(DecodeService, node):
        service = NodeService(node, NodeRole.DECODE, heartbeat=0.01)
        watch = cast(AsyncGenerator[node_pb2.WatchResponse, None], service.Watch(node_pb2.WatchRequest(), cast(Any, 0)))
        async with aclosing(watch) as messages, asyncio.timeout(PATIENCE):
            first = await anext(messages)
            assert first.reset and first.HasField("stats")
            for _ in range(3):
                message = await anext(messages)
                assert message.HasField("load") and not message.reset
    assert first.stats.num_leases_expired == 3
    [connector] = first.stats.connectors
    assert connector.connector == "in_process"
    assert connector.counters["bytes_fetched"] == 4096
    assert connector.refused["digest"] == 2
