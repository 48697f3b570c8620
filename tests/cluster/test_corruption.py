"""A byte of a published block is flipped before the decode node fetches it: the block is refused and counted, the
missing KV is computed again, and the client's tokens are right. Its holder, told of it, has it no more for prompts of
its own, nor what may have come of it. In Redis the value is changed, in shared memory the holder's file, over UCX the
memory from which it answers."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from kv_connector.header import Mismatch
from kv_connector.pool import LocalPool
from kv_connector.segments.segment import PeerSegment
from kv_connector.tiered import TieredConnector
from kv_connector.ucx.connector import UcxConnector
from kvrelay.core.kv.block_hash import BlockHash, block_hashes
from kvrelay.node.node import Node
from tests.cluster.cluster import cluster
from tests.cluster.prompts import prompt_of
from tests.engine.reference import Reference
from tests.kv_connector.settled import settled
from tests.redis_server import RedisServer

PROMPT = prompt_of(90)  # five full blocks and a tail
NUM_BLOCKS = 6
DAMAGED = 2  # the two before it arrive
BLOCK_SIZE = 16

Damage = Callable[[Node, BlockHash], None]


async def serve_with(damage: Damage, model: Path, *, in_pool: bool = True, **settings: Any) -> None:
    """Serves a request whose blocks are damaged between publication and fetch, while its decode node is held up. What
    is damaged is the pool of the prefill node, unless `in_pool` is False."""
    async with cluster(model, **settings) as running:
        prefill, decode = running.node("prefill-0"), running.node("decode-0")
        names = list(block_hashes(prefill.identity.kv_namespace.root(), PROMPT, BLOCK_SIZE, include_partial=True))
        gate = running.hold("decode-0")
        serving = asyncio.create_task(running.generate(PROMPT, max_tokens=20))
        async with asyncio.timeout(10):
            while sum(stats.blocks_published for stats in prefill.connector.all_stats().values()) < NUM_BLOCKS:
                await asyncio.sleep(0.002)
        await asyncio.to_thread(damage, prefill, names[DAMAGED])
        gate.set()
        served = await serving
        assert served.tokens[0] == Reference(model).generate(PROMPT, 20)
        refused = [stats.refused for stats in decode.connector.all_stats().values()]
        assert sum(sum(counts.values()) for counts in refused) == sum(counts[Mismatch.DIGEST] for counts in refused) > 0
        assert DAMAGED <= served.how.num_transferred_blocks < NUM_BLOCKS
        assert running.metric("recomputed_tokens_total", cause="transfer") >= BLOCK_SIZE
        if not in_pool:
            return
        async with asyncio.timeout(10):
            while not set(names[DAMAGED:]).isdisjoint(prefill.event_log.since(None).stored):
                await asyncio.sleep(0.002)
        assert set(names[:DAMAGED]) <= set(prefill.event_log.since(None).stored)
        longer = (*PROMPT, *prompt_of(40))
        assert (await running.generate(longer, max_tokens=20)).tokens[0] == Reference(model).generate(longer, 20)


async def test_a_byte_flipped_in_redis_changes_no_token(model: Path, redis_server: RedisServer) -> None:
    def damage(holder: Node, name: BlockHash) -> None:
        with redis.Redis.from_url(redis_server.url) as store:
            key = f"kvrelay:{name.hex()}"
            value = store.get(key)
            assert isinstance(value, bytes)
            store.set(key, _flipped(value), keepttl=True)

    await serve_with(damage, model, in_pool=False, connector="redis", redis_url=redis_server.url)


async def test_a_byte_flipped_in_the_shared_segment_changes_no_token(model: Path, tmp_path: Path) -> None:
    def damage(holder: Node, name: BlockHash) -> None:
        [path] = tmp_path.glob("kvrelay-prefill-0-*.kv")
        segment = PeerSegment(tmp_path, path.name)
        [[slot]] = segment.slots.find([name])
        place, size = segment.preamble.pool_offset, segment.preamble.geometry.block_bytes
        segment.close()
        with path.open("r+b") as file:
            file.seek(place + int(slot) * size)
            payload = file.read(size)
            file.seek(place + int(slot) * size)
            file.write(_flipped(payload))

    await serve_with(damage, model, connector="shared_memory", shared_memory_dir=str(tmp_path))


async def test_a_byte_flipped_in_a_ucx_reply_changes_no_token(model: Path) -> None:
    def damage(holder: Node, name: BlockHash) -> None:
        assert isinstance(holder.connector, TieredConnector)
        [ucx] = holder.connector.tiers
        assert isinstance(ucx, UcxConnector)
        shared = ucx._require().shared
        [(block_id, _)] = shared.find(name)
        assert isinstance(shared.pool, LocalPool)
        shared.pool.rows[block_id][-1] ^= 1

    await serve_with(damage, model, connector="ucx")


@pytest.mark.parametrize("prefill_nodes", [1, 2])
async def test_what_comes_of_damaged_memory_does_not_return_through_the_store(
    model: Path, reference: Reference, redis_server: RedisServer, prefill_nodes: int
) -> None:
    """A prompt is computed behind a damaged block, and published to Redis as well, with digests that match."""
    head = prompt_of(BLOCK_SIZE, seed=prefill_nodes)  # each has its own, because Redis keeps them
    short, long = [*head, *prompt_of(5)], [*head, *prompt_of(261)]
    settings: dict[str, Any] = {
        "connector": "shared_memory,redis",
        "redis_url": redis_server.url,
        "max_num_batched_tokens": 32,
    }
    async with cluster(model, prefill_nodes=prefill_nodes, **settings) as running:
        holder = running.node((await running.generate(short, max_tokens=1)).how.prefill_node or "")
        await running.wait_indexed()
        await settled(holder.connector)
        [name] = block_hashes(holder.identity.kv_namespace.root(), head, BLOCK_SIZE)
        block_id = await holder.engine_thread.call(lambda engine: engine.pool.find(name))
        assert block_id is not None
        _rows(holder)[block_id][:] ^= 0x80
        served = await running.generate(long, max_tokens=12)
        assert served.how.prefill_node == holder.identity.node_id and served.how.num_transferred_blocks == 0
        await running.wait_idle()
        for node in running.nodes:
            await settled(node.connector)
        async with asyncio.timeout(10):
            while name in holder.event_log.since(None).stored:
                await asyncio.sleep(0.002)
        await holder.all_published()  # Redis has been told as well
        again = await running.generate(long, max_tokens=12)
        assert again.tokens[0] == reference.generate(long, 12)


def _rows(node: Node) -> Any:
    connector: Any = node.connector
    return connector.tiers[0]._require().pool.rows


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])
