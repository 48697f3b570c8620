"""A prefill node between its router and its engine: a stream always ends, and leaves its lease or nothing."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

import pytest

from kv_connector.in_process import InProcessHub
from kvrelay.core.errors import InvalidRequestError, KVRelayError, UnavailableError
from kvrelay.core.rpc import Context
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.core.wire import sampling_to_wire
from kvrelay.v1 import common_pb2
from kvrelay.v1 import prefill_node_pb2 as pb
from prefill_node.service import PrefillService
from tests.engine.fake_runner import expected_output
from tests.node.fake_node import BrokenConnector, GatedRunner, make_node, serving

PROMPT = list(range(100, 120))
NO_CONTEXT = cast(Context, None)  # the service reads nothing from it
PATIENCE = 10.0


def prefill_request(request_id: str, prompt: Sequence[int]) -> pb.PrefillRequest:
    sampling = sampling_to_wire(SamplingParams(max_tokens=3, temperature=0.0, seed=0))
    return pb.PrefillRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=sampling, lease_ttl_ms=60_000
    )


def prefill(
    service: PrefillService, request_id: str, prompt: Sequence[int] = PROMPT
) -> AsyncGenerator[pb.PrefillEvent, None]:
    return service.Prefill(prefill_request(request_id, prompt), NO_CONTEXT)


async def num_leases(service: PrefillService) -> int:
    return await service._node.engine_thread.call(lambda engine: engine.load().num_leases)


async def release(service: PrefillService, *lease_ids: str) -> None:
    await service.ReleaseLeases(pb.ReleaseLeasesRequest(lease_ids=lease_ids), NO_CONTEXT)


async def test_a_stream_whose_lease_has_ended_early_still_ends() -> None:
    """The lease ends by expiry or release before the prompt is computed; the decode node must not wait for ever."""
    runner = GatedRunner()
    async with serving(PrefillService, node := make_node(runner)) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a")) as events:
            assert (await anext(events)).HasField("accepted")
            await release(service, "a")
            runner.gate.set()
            rest = [event async for event in events]
        assert max(event.progress.num_published_blocks for event in rest) == 3
        assert sum(event.HasField("finished") for event in rest) == 1
        await node.check_idle()


async def test_a_node_drains_until_the_stream_and_the_lease_are_over() -> None:
    """In either order: a lease that expires leaves its stream under way."""
    for lease_first in (True, False):
        runner = GatedRunner()
        async with serving(PrefillService, node := make_node(runner)) as service, asyncio.timeout(PATIENCE):
            async with aclosing(prefill(service, "a")) as events:
                assert (await anext(events)).HasField("accepted")
                draining = asyncio.create_task(node.drain())
                if lease_first:
                    await release(service, "a")
                    await asyncio.sleep(0)
                    assert not draining.done(), "the stream is open"
                runner.gate.set()
                assert [event async for event in events]
            if not lease_first:
                await asyncio.sleep(0)
                assert not draining.done(), "the lease is held"
                await release(service, "a")
            await draining
            await node.check_idle()


async def test_an_output_that_began_elsewhere_gets_its_next_token() -> None:
    whole = expected_output(PROMPT, 3, choice_index=5)
    async with serving(PrefillService, node := make_node()) as service, asyncio.timeout(PATIENCE):
        request = prefill_request("a", [*PROMPT, *whole[:2]])
        request.num_prior_output_tokens = 2
        request.first_choice_index = 5
        async with aclosing(service.Prefill(request, NO_CONTEXT)) as events:
            found = [event async for event in events]
        [finished] = [event.finished for event in found if event.HasField("finished")]
        [first] = finished.first_tokens
        assert (first.index, list(first.token_ids)) == (5, whole[2:])
        assert max(event.progress.num_published_blocks for event in found) == 3
        await release(service, "a")
        await node.check_idle()


async def test_a_duplicate_of_a_leased_request_is_refused_and_leaves_the_lease_alone() -> None:
    async with serving(PrefillService, node := make_node()) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a")) as events:
            async for _ in events:
                pass
        assert await num_leases(service) == 1
        with pytest.raises(InvalidRequestError):
            await anext(prefill(service, "a"))
        assert await num_leases(service) == 1
        assert not (await service.RenewLeases(pb.RenewLeasesRequest(lease_ids=["a"]), NO_CONTEXT)).unknown_lease_ids
        await release(service, "a")
        await node.check_idle()


async def test_a_request_that_may_become_too_long_is_left_to_another_node() -> None:
    async with serving(PrefillService, node := make_node()) as service:
        with pytest.raises(UnavailableError, match="node takes 512 tokens, not 513"):
            await anext(prefill(service, "a", [1] * 510))
        assert await num_leases(service) == 0
        await node.check_idle()


async def test_the_oldest_lease_ends_when_requests_wait_and_nothing_runs() -> None:
    """With two routers, a prompt may wait here for the blocks that the other router's lease holds."""
    async with serving(PrefillService, node := make_node()) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a", [1] * 300)) as events:
            async for _ in events:
                pass
        async with aclosing(prefill(service, "b", [2] * 300)) as events:
            assert (await anext(events)).HasField("accepted")
            version = -1
            while node.event_log.load.num_requests_waiting == 0:
                version = await node.event_log.changed(version)
            service._leases.sweep()
            service._leases.sweep()
            assert list(service._leases) == ["b"]
            rest = [event async for event in events]
        assert sum(event.HasField("finished") for event in rest) == 1
        await release(service, "b")
        await node.check_idle()


async def test_an_unforeseen_error_in_a_fetch_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    connector = BrokenConnector(InProcessHub())
    async with serving(PrefillService, node := make_node(connector=connector)) as service, asyncio.timeout(PATIENCE):
        request = prefill_request("a", PROMPT)
        source = common_pb2.KVSource(node_id="p", epoch=1, endpoint="nowhere")
        request.sources.add(source=source, num_blocks=2)
        async with aclosing(service.Prefill(request, NO_CONTEXT)) as events:
            assert (await anext(events)).HasField("accepted")
            with pytest.raises(KVRelayError, match="internal error"):
                await anext(events)
        assert "no such case" in caplog.text
        await node.check_idle()
