"""Requests over several connectors and a store that loses blocks: the tokens are right, and few are computed twice."""

import asyncio
import itertools
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis

from kv_connector.base import FetchOutcome, HostConnector
from kv_connector.tiered import TieredConnector
from kvrelay.core.kv.block_hash import block_hashes
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.engine.engine import Engine
from kvrelay.node.node import Node
from router.nodes.links import Links
from tests.cluster.agreement import check_agrees
from tests.cluster.cluster import Cluster, cluster
from tests.cluster.prompts import prompt_of
from tests.engine.reference import Reference
from tests.kv_connector.settled import settled
from tests.manual_clock import ManualClock
from tests.redis_server import RedisServer

PROMPT = prompt_of(100)
NUM_BLOCKS = 7
BLOCK_SIZE = 16


def tiers(node: Node) -> TieredConnector[HostConnector]:
    assert isinstance(node.connector, TieredConnector)
    return node.connector


async def stored(node: Node) -> None:
    """Returns once Redis has the blocks that the node has published."""
    await node.check_idle()
    await settled(node.connector)


async def forget(running: Cluster) -> None:
    """Empties the decode node's prefix cache."""
    await running.wait_idle()
    await running.node("decode-0").engine_thread.call(_evict_all)


def _evict_all(engine: Engine) -> None:
    block_ids = engine.pool.allocate(engine.pool.num_free)
    assert block_ids is not None
    engine.pool.release(block_ids)


@pytest.mark.parametrize("connector", ["redis", "shared_memory,redis"])
async def test_hits_that_redis_has_lost_are_offered_again(
    connector: str, model: Path, reference: Reference, redis_server: RedisServer
) -> None:
    """The prefill node still has the whole prompt, and the store has nothing. The decode node nevertheless fetches all
    of it."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    async with cluster(model, connector=connector, redis_url=redis_server.url) as running:
        first = await running.generate(PROMPT, max_tokens=8)
        assert first.how.num_transferred_blocks == NUM_BLOCKS
        await forget(running)
        await stored(running.node("prefill-0"))
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
            again = await running.generate(PROMPT, max_tokens=8)
            await running.wait_idle()
            await stored(running.node("prefill-0"))
            assert len(client.keys("kvrelay:*")) >= NUM_BLOCKS, "and so could another node"
        assert again.how.num_transferred_blocks == NUM_BLOCKS
        assert first.tokens == again.tokens == {0: reference.generate(PROMPT, 8)}


async def test_what_a_node_has_evicted_is_missing_to_others(model: Path) -> None:
    """It would be fetched in vain as soon as something else is in its place. Nor does a node count as another one."""
    async with cluster(model) as running:
        prefill, decode = running.node("prefill-0"), running.node("decode-0")
        assert prefill.identity.epoch != decode.identity.epoch
        await running.generate(PROMPT, max_tokens=8)
        await forget(running)
        names = list(block_hashes(prefill.identity.kv_namespace.root(), PROMPT, BLOCK_SIZE))
        block_ids = await decode.engine_thread.call(lambda engine: engine.pool.allocate(len(names)))
        assert block_ids is not None
        wanted = [NamedBlock(*named, BLOCK_SIZE) for named in zip(block_ids, names, strict=True)]
        source = KVSource(prefill.identity.node_id, prefill.identity.epoch, prefill.connector.endpoint)
        assert set(await decode.connector.fetch(source, wanted, timeout=10)) == {FetchOutcome.FETCHED}
        await prefill.engine_thread.call(_evict_all)
        assert set(await decode.connector.fetch(source, wanted, timeout=10)) == {FetchOutcome.MISSING}
        await decode.engine_thread.call(lambda engine: engine.pool.release(block_ids))


async def test_redis_serves_where_shared_memory_does_not_reach(
    model: Path, reference: Reference, redis_server: RedisServer
) -> None:
    options: dict[str, Any] = {"connector": "shared_memory,redis", "redis_url": redis_server.url}
    async with cluster(model, **options) as running:
        await check_agrees(running, reference, [PROMPT], 8)
        await forget(running)
        await stored(running.node("prefill-0"))
        decode = tiers(running.node("decode-0"))
        decode._host = "0123456789abcdef"  # has been carried to another machine
        before = decode.all_stats()["shared_memory"].blocks_fetched
        again = await running.generate(PROMPT, max_tokens=8)
        assert again.tokens[0] == reference.generate(PROMPT, 8)
        assert again.how.num_transferred_blocks == NUM_BLOCKS
        assert decode.all_stats()["redis"].blocks_fetched == NUM_BLOCKS
        assert decode.all_stats()["shared_memory"].blocks_fetched == before


async def test_without_any_redis_the_other_tiers_serve(model: Path, reference: Reference) -> None:
    async with cluster(model, connector="shared_memory,ucx,redis", redis_url="redis://127.0.0.1:1/0") as running:
        await check_agrees(running, reference, [prompt_of(length) for length in (1, 16, 100, 500)], 8)
        failed = tiers(running.node("prefill-0")).all_stats()["redis"]
        assert failed.failed > 0 and failed.blocks_published == 0


async def test_nodes_of_different_tiers_serve_together(model: Path, reference: Reference) -> None:
    """A cluster is like this in the middle of a rolling change of the setting."""
    async with cluster(model, connector="shared_memory,ucx", decode_settings={"connector": "ucx"}) as running:
        assert [node.connector.name for node in running.nodes] == ["shared_memory,ucx", "ucx"]
        await check_agrees(running, reference, [prompt_of(length) for length in (1, 100)], 8)
        assert running.node("decode-0").connector.all_stats()["ucx"].blocks_fetched == 1 + NUM_BLOCKS


async def test_requests_go_on_while_redis_is_stopped_and_use_it_again_afterwards(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Running requests are not held up, new ones are computed where they are decoded, and afterwards Redis is used
    again."""
    server = RedisServer(tmp_path)
    try:
        async with cluster(model, connector="redis", redis_url=server.url) as running, asyncio.timeout(90):
            begun = asyncio.Event()
            stream = asyncio.create_task(
                running.generate(PROMPT, max_tokens=200, on_tokens=lambda num_tokens: begun.set())
            )
            await begun.wait()
            os.kill(server.pid, signal.SIGSTOP)
            served = await asyncio.gather(*(running.generate(prompt_of(50, i), max_tokens=8) for i in range(3)))
            assert (await stream).tokens[0] == reference.generate(PROMPT, 200)
            for i, each in enumerate(served):
                assert each.tokens[0] == reference.generate(prompt_of(50, i), 8)
                assert each.how.num_transferred_blocks == 0
            os.kill(server.pid, signal.SIGCONT)
            for i in itertools.count(10):  # until both nodes have tried it again
                again = await running.generate(prompt_of(50, i), max_tokens=2)
                assert again.tokens[0] == reference.generate(prompt_of(50, i), 2)
                if again.how.num_transferred_blocks:
                    break
    finally:
        server.stop()


async def test_nodes_that_do_not_reach_each_other_compute_prompts_once_in_the_end(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """They are on one host, but do not see the same directory. The first prompts are computed at both."""
    async with cluster(model, decode_settings={"shared_memory_dir": str(tmp_path)}) as running:
        clock = ManualClock()
        running.registry.decode[0].links = Links(clock, Random(0))
        computed = []
        for number in range(6):
            clock.seconds += 0.5 if number == 5 else 0.0
            served = await running.generate(prompt_of(50, number), max_tokens=8)
            assert served.tokens[0] == reference.generate(prompt_of(50, number), 8)
            computed.append((served.how.prefill_node, served.how.kv.num_recomputed_tokens))
    assert computed == [("prefill-0", 50)] * 3 + [(None, 0)] * 2 + [("prefill-0", 50)]
