"""`kvrelay serve` with a real Redis: blocks move through it and stay in it under their names; as a second connector it
may die."""

from pathlib import Path

import pytest
import redis

from tests.e2e.cluster import BLOCK_SIZE, SMALL, Oracle, served, some_token_ids
from tests.e2e.processes import segments_of
from tests.redis_server import RedisServer

pytestmark = pytest.mark.timeout(120)


def test_blocks_travel_through_redis(model: Path, directory: Path, oracle: Oracle, redis_server: RedisServer) -> None:
    arguments = ("--connector", "redis", "--redis-url", redis_server.url, "--local-prefill-max-tokens", "0")
    prompt = some_token_ids(5 * BLOCK_SIZE + 3, seed=5)
    with (
        redis.Redis.from_url(redis_server.url) as store,
        served(model, *SMALL, *arguments, directory=directory) as cluster,
    ):
        before = set(store.scan_iter(count=1000))
        response = cluster.router.generate(prompt, 20)
        assert list(response.outputs[0].token_ids) == oracle.tokens(prompt, 20)
        assert response.trace.num_transferred_blocks == response.trace.num_prompt_blocks == 6
        blocks = set(store.scan_iter(count=1000)) - before
        assert len(blocks) >= 6
        assert all(0 < int(store.ttl(key)) <= 3600 for key in blocks)
        assert segments_of(model) == set()


def test_the_cluster_serves_on_when_redis_behind_shared_memory_dies(
    model: Path, directory: Path, tmp_path: Path, oracle: Oracle
) -> None:
    server = RedisServer(tmp_path)
    arguments = ("--connector", "shared_memory,redis", "--redis-url", server.url, "--local-prefill-max-tokens", "0")
    try:
        with served(model, *SMALL, *arguments, directory=directory) as cluster:
            for seed in range(6):
                if seed == 2:
                    server.stop()
                prompt = some_token_ids(5 * BLOCK_SIZE + 3, seed=seed)
                response = cluster.router.generate(prompt, 20)
                assert list(response.outputs[0].token_ids) == oracle.tokens(prompt, 20)
                assert response.trace.num_transferred_blocks == 6
            cluster.program.wait_log("publishing to Redis failed")
    finally:
        server.stop()
