"""What settings do in a whole router, and how it stops: `serve` over a scripted node, in this process."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from kvrelay.core.generation.outputs import FinishReason
from router.app import _relay, serve
from router.relay.limits import RelayLimits
from router.settings import RouterSettings
from tests.router.routed import give_up
from tests.router.scripted_cluster import registered
from tests.router.scripted_nodes import PATIENCE, node_that_is_not_live, soon, token
from tests.router.served import served


async def test_pages_of_allowed_origins_may_call(tokenizer_directory: Path) -> None:
    async with served(tokenizer_directory, allowed_origins=("https://chat.example.com",)) as router:
        for origin, allowed in (("https://chat.example.com", True), ("https://other.example.com", False)):
            answer = await router.http.get("/v1/models", headers={"origin": origin})
            assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)


async def test_a_request_may_take_request_timeout(tokenizer_directory: Path) -> None:
    async with served(tokenizer_directory, request_timeout=100.0) as router:
        posted = asyncio.create_task(router.post())
        admit = await router.decode.admit()
        assert 100_000 - 1000 * PATIENCE < admit.timeout_ms <= 100_000
        await give_up(posted)


async def test_no_more_than_max_concurrent_requests_run(tokenizer_directory: Path) -> None:
    async with served(tokenizer_directory, max_concurrent_requests=1) as router:
        posted = asyncio.create_task(router.post())
        await router.decode.admit()
        refused = await router.post()
        assert refused.status_code == 429 and "1 requests are running" in refused.json()["error"]["message"]
        await give_up(posted)


async def test_every_limit_of_the_relay_is_the_setting_of_its_name() -> None:
    limits = RelayLimits(
        max_concurrent_requests=2, max_node_losses=7, node_wait=11.0, lease_ttl=13.0, node_timeout=17.0
    )
    settings = RouterSettings(
        max_concurrent_requests=2, max_node_losses=7, node_wait=11.0, lease_ttl=13.0, node_timeout=17.0
    )
    async with registered() as registry:
        assert _relay(settings, registry, CollectorRegistry())._limits == limits


async def test_a_stop_ends_the_wait_for_nodes_at_once(tokenizer_directory: Path) -> None:
    async with AsyncExitStack() as stack:
        silent = await stack.enter_async_context(node_that_is_not_live())
        stop = asyncio.Event()
        settings = RouterSettings(
            model=str(tokenizer_directory),
            decode_nodes=(silent.address,),
            port=0,
            grpc_port=0,
            start_timeout=3600.0,
            node_silence=3600.0,
        )
        started = asyncio.create_task(stack.enter_async_context(serve(settings, stop, asyncio.Event())))
        await soon(silent.watch_requests)
        assert not started.done()
        stop.set()
        async with asyncio.timeout(PATIENCE):
            await started


async def test_while_a_router_stops_its_health_says_so_and_a_running_request_ends_well(
    tokenizer_directory: Path,
) -> None:
    async with served(tokenizer_directory, stop_timeout=3600.0) as router:
        posted = asyncio.create_task(router.post())
        admit = await router.decode.admit()
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service="kvrelay.v1.Router"), timeout=PATIENCE)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stopping = asyncio.create_task(router.router.aclose())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert not posted.done() and not stopping.done()
            watch.cancel()
        router.decode.tokens(admit.request_id, token(3, finish=FinishReason.LENGTH))
        assert (await posted).status_code == 200
        await stopping
