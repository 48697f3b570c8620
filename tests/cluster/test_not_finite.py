"""A prefill node whose memory or processor fails for a moment writes KV that is not finite, under a chunk whose logits
nobody looks at. The decode node has fetched it by the time that this shows. The client gets its tokens all the same,
and nobody finds that KV."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from kv_connector.header import HEADER_BYTES, BlockHeader, payload_digest
from kvrelay.core.errors import NotFiniteError
from kvrelay.core.kv.block_hash import BlockHash, block_hashes
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.runner import LaunchedStep, Runner
from kvrelay.node.node import Node
from tests.cluster.cluster import cluster
from tests.cluster.prompts import prompt_of
from tests.cluster.undisturbed import nodes
from tests.engine.reference import Reference
from tests.kv_connector.settled import settled
from tests.redis_server import RedisServer

PROMPT = prompt_of(90)  # in three chunks
CHUNK = 32
BLOCK_SIZE = 16
PATIENCE = 20.0


class FaultyRunner:
    """A runner before that of a node. The KV that its first step has written is overwritten with NaN. Its first step
    that samples waits until `gate` is open."""

    def __init__(self, node: Node) -> None:
        engine = node.engine_thread._engine
        self.gate = threading.Event()
        self._runner: Runner = engine._runner
        self._rows = _rows(node)
        self._had_fault = False
        engine._runner = self

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        if any(entry.rows for entry in plan.scheduled):
            assert self.gate.wait(PATIENCE)
        launched = self._runner.launch(plan)
        if not self._had_fault:
            self._had_fault = True
            [entry] = plan.scheduled
            for block_id in entry.block_table[: entry.num_scheduled_tokens // BLOCK_SIZE]:
                self._rows[block_id][:] = 0xFF  # in any format, a NaN
        return launched


@pytest.mark.parametrize("prefill_nodes", [1, 2])
async def test_kv_that_is_not_finite_goes_no_further_than_the_nodes_of_its_request(
    model: Path, reference: Reference, prefill_nodes: int
) -> None:
    async with nodes(model, prefill_nodes, 1, max_num_batched_tokens=CHUNK) as running:
        prefill, decode = running.node("prefill-0"), running.node("decode-0")
        names = list(block_hashes(prefill.identity.kv_namespace.root(), PROMPT, BLOCK_SIZE, include_partial=True))
        fault = FaultyRunner(prefill)
        serving = asyncio.create_task(running.generate(PROMPT, max_tokens=20))
        async with asyncio.timeout(PATIENCE):
            while len(bad := await _found(decode, names)) < CHUNK // BLOCK_SIZE:
                await asyncio.sleep(0.002)
        assert not any(map(_is_finite, bad)), "the decode node has them under their names"
        fault.gate.set()
        served = await serving
        assert served.tokens[0] == reference.generate(PROMPT, 20)
        assert served.how.num_migrations >= 1
        assert running.metric("request_migrations_total", cause="prefill_node_lost") == served.how.num_migrations
        for node in running.nodes:
            assert all(map(_is_finite, await _found(node, names)))
        again = await running.generate(PROMPT, max_tokens=20)
        assert again.tokens == served.tokens
        assert again.how.num_migrations == 0


async def test_a_partial_block_in_redis_that_is_not_finite_fails_one_request(
    model: Path, reference: Reference, redis_server: RedisServer
) -> None:
    """The node that has computed it ended before it could have it deleted. Decode nodes do not name partial blocks, and
    prefill nodes that compute it again offer it to Redis, which has it."""
    prompt = prompt_of(40)
    settings: dict[str, Any] = {"connector": "redis", "redis_url": redis_server.url}
    async with cluster(model, **settings) as running:
        await running.generate(prompt, max_tokens=4)
        await running.wait_idle()
        *_, tail = block_hashes(running.kv_namespace.root(), prompt, BLOCK_SIZE, include_partial=True)
    with redis.Redis.from_url(redis_server.url) as store:
        key = f"kvrelay:{tail.hex()}"
        value = store.get(key)
        assert isinstance(value, bytes)
        payload = b"\xff" * (len(value) - HEADER_BYTES)
        header = replace(BlockHeader.decode(value[:HEADER_BYTES]), payload_digest=payload_digest(payload))
        store.set(key, header.encode() + payload, keepttl=True)
    async with cluster(model, **settings) as running:
        with pytest.raises(NotFiniteError):
            await running.generate(prompt, max_tokens=4)
        await running.wait_idle()
        for node in running.nodes:
            await settled(node.connector)
        assert (await running.generate(prompt, max_tokens=4)).tokens[0] == reference.generate(prompt, 4)


async def _found(node: Node, names: list[BlockHash]) -> list[Any]:
    """Returns the bytes of the leading blocks that the node finds by name."""
    block_ids = await node.engine_thread.call(lambda engine: engine.pool.lookup(names))
    return [_rows(node)[block_id] for block_id in block_ids]


def _rows(node: Node) -> Any:
    connector: Any = node.connector
    return connector.tiers[0]._require().pool.rows


def _is_finite(row: Any) -> bool:
    return bool(np.isfinite(np.frombuffer(row, np.float32)).all())
