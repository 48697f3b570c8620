"""The tokens of a cluster are those of transformers: for every model family, and every way in which a prompt's KV can
come about."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.agreement import check_agrees
from tests.cluster.cluster import Cluster, cluster
from tests.cluster.prompts import VOCAB_SIZE, prompt_of
from tests.demo_model import DEMO_MODEL
from tests.engine.reference import Reference
from tests.engine.tiny_models import FAMILIES, make_tiny_model
from tests.redis_server import RedisServer

CONNECTORS = ("shared_memory", "ucx", "redis")
# To a connector a block is bytes, whatever model they are of: each family goes through one, and one through all.
PAIRS = sorted({*zip(FAMILIES, itertools.cycle(CONNECTORS), strict=False), *(("llama", name) for name in CONNECTORS)})


@pytest.mark.parametrize(("family", "connector"), PAIRS)
async def test_every_model_family_gives_transformers_tokens_over_a_connector(
    family: str, connector: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """Prompts are short, exact multiples of the block size, or several chunks long; then all of them come again as
    prefix hits. All of their KV moves, and none is computed twice."""
    model = make_tiny_model(family, tmp_path, vocab_size=VOCAB_SIZE)
    reference = Reference(model)
    prompts = [prompt_of(length) for length in (1, 15, 16, 17, 48, 100, 700)]
    options: dict[str, Any] = {"connector": connector, "redis_url": redis_server.url, "max_num_batched_tokens": 64}
    async with cluster(model, **options) as running:
        first = await check_agrees(running, reference, prompts, max_tokens=10)
        again = await check_agrees(running, reference, [[*prompt, 5, 6, 7] for prompt in prompts], max_tokens=4)
    assert all(served.how.kv.num_recomputed_tokens == 0 for served in (*first, *again))
    assert all(served.how.num_computed_tokens < 16 + 3 for served in again)


@pytest.fixture(params=CONNECTORS)
async def running(request: pytest.FixtureRequest, model: Path, redis_server: RedisServer) -> AsyncIterator[Cluster]:
    async with cluster(model, connector=request.param, redis_url=redis_server.url) as started:
        yield started


async def test_prompts_of_1_to_2000_tokens_give_transformers_tokens(running: Cluster, reference: Reference) -> None:
    await check_agrees(running, reference, [prompt_of(length) for length in (1, 2, 255, 256, 257, 1000, 1024, 2000)], 8)


async def test_16_concurrent_requests_with_a_shared_prefix_give_transformers_tokens(
    running: Cluster, reference: Reference
) -> None:
    shared = prompt_of(200)
    await check_agrees(running, reference, [shared], 2)
    await check_agrees(running, reference, [[*shared, *prompt_of(3 + 5 * i, i)] for i in range(16)], 12)


async def test_the_demo_model_gives_transformers_tokens() -> None:
    demo = Reference(DEMO_MODEL)
    async with cluster(DEMO_MODEL, attention_backend="auto") as started:
        vocab_size = started.relay.served_model().vocab_size
        prompts = [prompt_of(length, vocab_size=vocab_size) for length in (1, 16, 37, 300, 2000)]
        await check_agrees(started, demo, prompts, 16)


async def test_the_reference_backend_serves_the_same_tokens(model: Path, reference: Reference) -> None:
    """A machine without a compiler uses this backend."""
    async with cluster(model, attention_backend="reference") as started:
        await check_agrees(started, reference, [prompt_of(length) for length in (1, 16, 77)], 8)


async def test_preemption_changes_no_token(model: Path, reference: Reference) -> None:
    async with cluster(model, num_blocks=24, max_model_len=200) as started:
        await check_agrees(started, reference, [prompt_of(40, i) for i in range(8)], 60)
        assert sum(node.event_log.load.num_preemptions for node in started.nodes) > 0


async def test_a_cluster_of_one_decode_node_gives_transformers_tokens(model: Path, reference: Reference) -> None:
    async with cluster(model, prefill_nodes=0) as started:
        prompts = [prompt_of(length) for length in (1, 16, 33, 500)]
        served = await asyncio.gather(*(started.generate(prompt, max_tokens=8) for prompt in prompts))
        for prompt, result in zip(prompts, served, strict=True):
            assert result.tokens[0] == reference.generate(prompt, 8)
            assert result.how.prefill_node is None
