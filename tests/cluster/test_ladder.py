"""KV that does not arrive, in clusters of real nodes: every rung of the failure ladder gives the tokens of an
undisturbed run, and nothing is left afterwards (`cluster` checks this)."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from decode_node.service import DecodeService
from kvrelay.core.kv.block_hash import BlockHash
from router.request import KVOrigins
from tests.cluster.cluster import Cluster, Served
from tests.cluster.interference import Interference
from tests.cluster.prompts import VOCAB_SIZE, prompt_of
from tests.cluster.undisturbed import PARALLEL, SAMPLED, check_same, killed_after, nodes, serve_undisturbed, served_with
from tests.engine.tiny_models import make_tiny_model
from tests.redis_server import RedisServer

PROMPT = prompt_of(100)
NUM_BLOCKS = 7  # the last one is partial
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 20},
    "sampled": {**SAMPLED, "max_tokens": 30, "min_tokens": 20},
    "parallel": {**PARALLEL, "max_tokens": 12},
    "prompt_logprobs": {"max_tokens": 6, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> dict[str, Served]:
    return asyncio.run(serve_undisturbed(model, PROMPT, SAMPLINGS))


@pytest.fixture(scope="module")
def private_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Starts a server for this module alone, because its tests count, damage and flush whatever the server holds."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


def num_refused(running: Cluster) -> float:
    return running.metric("kv_ladder_failures_total", cause="refused")


async def generate_late(running: Cluster, decode_node: str, **sampling: Any) -> Served:
    """Holds the decode node up until it was told that the prefill node has published everything."""
    gate = running.hold(decode_node)
    serving = asyncio.create_task(running.generate(PROMPT, **sampling))
    service = running.servers[decode_node]._service
    assert isinstance(service, DecodeService)
    async with asyncio.timeout(20.0):
        while not any(pull.ended for decode in service._active.values() for pull in decode.pulls):
            await asyncio.sleep(0.002)
    gate.set()
    return await serving


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "parallel"])
async def test_corrupted_blocks_come_from_another_holder(
    model: Path, undisturbed: dict[str, Served], sampling: str
) -> None:
    async with nodes(model, 2, 2) as running:
        await running.generate(PROMPT, max_tokens=1)
        await running.wait_idle()
        await running.wait_indexed()
        Interference(running.node("prefill-1"), corrupt=True)
        served = await generate_late(running, "decode-1", **SAMPLINGS[sampling])
        assert num_refused(running) == NUM_BLOCKS
    check_same(served, undisturbed[sampling])
    assert served.how.decode_node == "decode-1"
    fetched_by_prefill = 6  # full blocks that prefill-0 had
    assert served.how.kv == KVOrigins(num_holder_blocks=fetched_by_prefill + NUM_BLOCKS)


@pytest.mark.parametrize("prefill_nodes", [1, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_corrupted_blocks_that_no_other_node_holds_are_computed_where_they_are_read(
    model: Path, undisturbed: dict[str, Served], sampling: str, prefill_nodes: int
) -> None:
    """No other prefill node is asked: it might fetch from a store what was computed from them."""
    async with nodes(model, prefill_nodes, 1) as running:
        Interference(running.node("prefill-0"), corrupt=True)
        served = await running.generate(PROMPT, **SAMPLINGS[sampling])
        assert num_refused(running) == NUM_BLOCKS
    check_same(served, undisturbed[sampling])
    assert len(served.prompt_logprobs) == len(undisturbed[sampling].prompt_logprobs)
    assert served.how.kv == KVOrigins(num_recomputed_tokens=len(PROMPT))
    assert (served.how.prefill_node, served.how.num_migrations) == ("prefill-0", 0)


async def test_a_corrupted_refill_leaves_the_prompt_to_the_decode_node(
    model: Path, undisturbed: dict[str, Served]
) -> None:
    async with nodes(model, 3, 1) as running:
        dying = Interference(running.node("prefill-0"))
        dying.open.clear()
        for index in (1, 2):
            Interference(running.node(f"prefill-{index}"), corrupt=True)
        served = await served_with(running, PROMPT, lambda: running.kill("prefill-0"), **SAMPLINGS["sampled"])
        dying.open.set()
        assert num_refused(running) == NUM_BLOCKS, "one refill per attempt"
    check_same(served, undisturbed["sampled"])
    assert served.how.kv == KVOrigins(num_refilled_tokens=len(PROMPT), num_recomputed_tokens=len(PROMPT))


async def test_corrupted_blocks_do_not_come_from_the_store(model: Path, undisturbed: dict[str, Served]) -> None:
    """Their holder may have put there what it has computed from them."""
    store: dict[BlockHash, bytes] = {}
    async with nodes(model, 2, 1) as running:
        Interference(running.node("prefill-0"), corrupt=True, store=store)
        Interference(running.node("decode-0"), store=store)
        served = await running.generate(PROMPT, **SAMPLINGS["sampled"])
        assert num_refused(running) == NUM_BLOCKS
    check_same(served, undisturbed["sampled"])
    assert served.how.kv == KVOrigins(num_recomputed_tokens=len(PROMPT))


async def test_missing_blocks_come_from_the_store(model: Path, undisturbed: dict[str, Served]) -> None:
    store: dict[BlockHash, bytes] = {}
    async with nodes(model, 2, 1) as running:
        losing = Interference(running.node("prefill-0"), store=store)
        Interference(running.node("decode-0"), store=store)
        gate = running.hold("decode-0")
        serving = asyncio.create_task(running.generate(PROMPT, **SAMPLINGS["sampled"]))
        await losing.has_published(NUM_BLOCKS)
        await running.node("prefill-0").engine_thread.call(lambda engine: losing.retract(range(engine.pool.num_blocks)))
        gate.set()
        served = await serving
    check_same(served, undisturbed["sampled"])
    assert served.how.kv == KVOrigins(num_store_blocks=NUM_BLOCKS)


async def test_a_prefill_node_takes_from_the_store_what_no_node_holds(
    model: Path, undisturbed: dict[str, Served]
) -> None:
    """KV in the store outlives the nodes that computed it."""
    store: dict[BlockHash, bytes] = {}
    for expected in (KVOrigins(num_prefill_node_blocks=NUM_BLOCKS), None):
        async with nodes(model, 1, 1) as running:
            Interference(running.node("prefill-0"), store=store)
            served = await running.generate(PROMPT, **SAMPLINGS["greedy"])
        check_same(served, undisturbed["greedy"])
        if expected is not None:
            assert served.how.kv == expected
    assert served.how.kv == KVOrigins(num_prefill_node_blocks=NUM_BLOCKS, num_store_blocks=6)
    assert served.how.num_computed_tokens == 4


@pytest.mark.parametrize("prefill_nodes", [1, 2])
async def test_a_prefill_node_that_dies_before_it_published_is_replaced_or_done_without(
    model: Path, undisturbed: dict[str, Served], prefill_nodes: int
) -> None:
    async with nodes(model, prefill_nodes, 1) as running:
        dying = running.node("prefill-0")
        interference = Interference(dying)
        interference.open.clear()
        served = await served_with(running, PROMPT, lambda: running.kill("prefill-0"), **SAMPLINGS["sampled"])
        interference.open.set()
    check_same(served, undisturbed["sampled"])
    assert served.how.num_migrations == 0
    if prefill_nodes == 1:
        assert served.how.kv == KVOrigins(num_recomputed_tokens=len(PROMPT))
    else:
        assert served.how.kv == KVOrigins(num_refill_blocks=NUM_BLOCKS, num_refilled_tokens=len(PROMPT))


async def test_published_blocks_of_a_prefill_node_that_died_are_prefilled_by_another(
    model: Path, undisturbed: dict[str, Served]
) -> None:
    async with nodes(model, 2, 1) as running:
        dying = running.node("prefill-0")
        interference = Interference(dying)
        gate = running.hold("decode-0")
        has_tokens = asyncio.Event()
        generating = running.generate(PROMPT, on_tokens=lambda count: has_tokens.set(), **SAMPLINGS["parallel"])
        serving = asyncio.create_task(generating)
        await interference.has_published(NUM_BLOCKS)
        await asyncio.wait_for(has_tokens.wait(), 20.0)
        await running.kill("prefill-0")
        await dying.connector.close()
        gate.set()
        served = await serving
    check_same(served, undisturbed["parallel"])
    assert served.how.kv == KVOrigins(num_refill_blocks=NUM_BLOCKS, num_refilled_tokens=len(PROMPT))


async def test_corrupted_blocks_of_a_replay_change_no_token(model: Path, undisturbed: dict[str, Served]) -> None:
    """The decode node dies, and the blocks of the next prefill node are corrupted."""
    async with nodes(model, 2, 2) as running:
        Interference(running.node("prefill-1"), corrupt=True)
        served = await killed_after(running, PROMPT, 5, **SAMPLINGS["sampled"])
    check_same(served, undisturbed["sampled"])
    assert (served.how.decode_node, served.how.num_migrations) == ("decode-1", 1)


@pytest.mark.parametrize("trouble", ["wiped", "damaged", "stopped"])
async def test_blocks_lost_in_redis_alone_are_computed_only_once_more(
    model: Path, undisturbed: dict[str, Served], private_redis: RedisServer, trouble: str
) -> None:
    """What another prefill node computes would have to come through the same Redis, so the decode node computes."""
    async with nodes(model, 2, 1, connector="redis", redis_url=private_redis.url) as running:
        gate = running.hold("decode-0")
        serving = asyncio.create_task(running.generate(PROMPT, **SAMPLINGS["sampled"]))
        with Redis.from_url(private_redis.url) as client:
            async with asyncio.timeout(20.0):
                while len(client.keys("*")) < NUM_BLOCKS:
                    await asyncio.sleep(0.002)
            match trouble:
                case "wiped":
                    client.flushall()
                case "damaged":
                    for key in client.keys("*"):
                        client.setrange(key, 500, b"\xff\x00\xff")
                case _:
                    private_redis.stop()
            gate.set()
            served = await serving
            if trouble == "stopped":
                private_redis.restart()
            client.flushall()
    check_same(served, undisturbed["sampled"])
    assert served.how.kv == KVOrigins(num_recomputed_tokens=len(PROMPT))


# -- decode nodes that prefill by themselves -------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_decode_node_alone_fetches_what_another_holds(
    model: Path, undisturbed: dict[str, Served], sampling: str
) -> None:
    async with nodes(model, 0, 2) as running:
        await running.generate(PROMPT, max_tokens=1)
        await running.wait_idle()
        await running.wait_indexed()
        served = await running.generate(PROMPT, **SAMPLINGS[sampling])
    check_same(served, undisturbed[sampling])
    assert (served.how.prefill_node, served.how.decode_node) == (None, "decode-1")
    fetched = 0 if "prompt_logprobs" in SAMPLINGS[sampling] else len(PROMPT) // 16
    assert served.how.kv == KVOrigins(num_holder_blocks=fetched)
    assert served.how.num_computed_tokens == len(PROMPT) - 16 * fetched


async def test_a_decode_node_alone_computes_what_another_holds_damaged(
    model: Path, undisturbed: dict[str, Served]
) -> None:
    async with nodes(model, 0, 2) as running:
        Interference(running.node("decode-0"), corrupt=True)
        await running.generate(PROMPT, max_tokens=1)
        await running.wait_idle()
        await running.wait_indexed()
        served = await running.generate(PROMPT, **SAMPLINGS["greedy"])
        assert num_refused(running) == len(PROMPT) // 16
    check_same(served, undisturbed["greedy"])
    assert served.how.kv == KVOrigins() and served.how.num_computed_tokens == len(PROMPT)


async def test_a_store_outlives_all_decode_nodes(
    model: Path, undisturbed: dict[str, Served], private_redis: RedisServer
) -> None:
    with Redis.from_url(private_redis.url) as client:
        client.flushall()
    for num_store_blocks in (0, len(PROMPT) // 16):
        async with nodes(model, 0, 1, connector="redis", redis_url=private_redis.url) as running:
            served = await running.generate(PROMPT, **SAMPLINGS["greedy"])
            await running.wait_idle()
        check_same(served, undisturbed["greedy"])
        assert served.how.kv == KVOrigins(num_store_blocks=num_store_blocks)
