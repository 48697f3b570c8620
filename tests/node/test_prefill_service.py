"""A prefill node between its router and its engine: a stream always ends, and leaves its lease or nothing."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

import pytest

from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.errors import ContextLengthError, InvalidRequestError, KVError, KVRelayError, UnavailableError
from kvrelay.core.kv.block_hash import block_hashes
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.rpc.wire import source_to_wire
from kvrelay.engine.step_result import Reservation, StepResult
from kvrelay.v1 import common_pb2
from kvrelay.v1 import prefill_node_pb2 as pb
from prefill_node import leases
from prefill_node.service import PrefillService
from tests.engine.fake_runner import FakeRunner, expected_output
from tests.manual_clock import ManualClock
from tests.node.fake_node import (
    BLOCK_SIZE,
    NAMESPACE,
    NUM_BLOCKS,
    BrokenConnector,
    FailingRunner,
    GatedRunner,
    make_node,
    serving,
)
from tests.node.holders import Holder, LadderConnector
from tests.node.prefill_calls import NO_CONTEXT, PATIENCE, PROMPT, prefill, prefill_request, release, run


class LosingConnector(InProcessConnector):
    """A connector that publishes nothing while `is_lost` is set."""

    is_lost = False

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        if self.is_lost:
            raise KVError("not reachable")
        await super().publish(blocks)


async def num_leases(service: PrefillService) -> int:
    return await service._node.engine_thread.call(lambda engine: engine.load().num_leases)


async def _all(events: AsyncIterator[pb.PrefillEvent]) -> list[pb.PrefillEvent]:
    return [event async for event in events]


async def test_a_prefill_whose_lease_has_expired_still_ends() -> None:
    """The decode node must not wait for ever."""
    clock, runner = ManualClock(), GatedRunner()
    node = make_node(runner)
    async with serving(partial(PrefillService, clock=clock), node) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a")) as events:
            assert (await anext(events)).HasField("accepted")
            clock.seconds += 61.0
            service._leases.sweep()
            assert not service._leases
            with pytest.raises(InvalidRequestError, match="running already"):
                await anext(prefill(service, "a"))
            runner.gate.set()
            rest = [event async for event in events]
        assert max(event.progress.num_published_blocks for event in rest) == 3
        assert sum(event.HasField("finished") for event in rest) == 1
        await node.check_idle()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_blocks_that_could_not_be_published_are_not_reported(is_lost: bool) -> None:
    """The router would send the decode node for them in vain. The stream ends all the same."""
    connector = LosingConnector(InProcessHub())
    connector.is_lost = is_lost
    async with serving(PrefillService, node := make_node(connector=connector)) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a")) as events:
            found = [event async for event in events]
        assert max(event.progress.num_published_blocks for event in found) == (0 if is_lost else 3)
        assert sum(event.HasField("finished") for event in found) == 1
        await release(service, "a")
        await node.check_idle()


async def test_blocks_behind_some_that_could_not_be_published_are_not_reported_either() -> None:
    """They are of no use without those before them."""
    runner = GatedRunner()
    async with serving(PrefillService, node := make_node(runner)) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a")) as events:
            assert (await anext(events)).HasField("accepted")
            service._on_progress("a", 1, True)
            service._on_progress("a", 2, False)
            runner.gate.set()
            progress = [event.progress async for event in events if event.HasField("progress")]
        assert [each.num_published_blocks for each in progress] == [1]
        await release(service, "a")
        await node.check_idle()


async def test_a_node_drains_until_the_prefill_and_the_lease_are_over() -> None:
    """In either order: a lease that expires leaves its prefill under way."""
    for lease_first in (True, False):
        clock, runner = ManualClock(), GatedRunner()
        node = make_node(runner)
        async with serving(partial(PrefillService, clock=clock), node) as service, asyncio.timeout(PATIENCE):
            async with aclosing(prefill(service, "a")) as events:
                assert (await anext(events)).HasField("accepted")
                draining = asyncio.create_task(node.drain())
                if lease_first:
                    clock.seconds += 61.0
                    service._leases.sweep()
                    assert node.activity, "the prefill is under way"
                runner.gate.set()
                assert [event async for event in events]
            if not lease_first:
                await node.all_published()  # as draining would have to wait, too
                assert node.activity and not draining.done(), "the lease is held"
                await release(service, "a")
            await draining
            await node.check_idle()


async def test_an_output_that_began_elsewhere_gets_its_next_token() -> None:
    whole = expected_output(PROMPT, 3, choice_index=5)
    async with serving(PrefillService, node := make_node()) as service, asyncio.timeout(PATIENCE):
        request = prefill_request("a", [*PROMPT, *whole[:2]])
        request.num_prior_output_tokens = 2
        request.first_choice_index = 5
        async with aclosing(run(service, request)) as events:
            found = [event async for event in events]
        [finished] = [event.finished for event in found if event.HasField("finished")]
        [first] = finished.first_tokens
        assert (first.index, list(first.token_ids)) == (5, whole[2:])
        assert max(event.progress.num_published_blocks for event in found) == 3
        await release(service, "a")
        await node.check_idle()


async def test_the_first_tokens_of_all_outputs_come_together_with_where_the_prompts_kv_is_from() -> None:
    hub, runner = InProcessHub(), FakeRunner(NUM_BLOCKS, BLOCK_SIZE)
    runner.pool = [[0] * BLOCK_SIZE for _ in runner.pool]  # it does not see what is fetched
    holder = Holder(hub, "h")
    second = list(block_hashes(NAMESPACE.root(), PROMPT, BLOCK_SIZE))[1]
    await holder.hold(Reservation("a", BLOCK_SIZE, (NamedBlock(0, second, BLOCK_SIZE),)), 1)
    node = make_node(runner, InProcessConnector(hub))
    async with serving(PrefillService, node) as service, asyncio.timeout(PATIENCE):
        request = prefill_request("a", PROMPT)
        request.sampling_params.n = 3
        request.sources.add(source=source_to_wire(holder.source), num_blocks=2)
        for prompt in (prefill_request("before", PROMPT[: BLOCK_SIZE + 1]), request):
            async with aclosing(run(service, prompt)) as events:
                [finished] = [event.finished async for event in events if event.HasField("finished")]
        assert [first.index for first in finished.first_tokens] == [0, 1, 2]
        assert (finished.num_cached_tokens, finished.fetches.num_tokens) == (BLOCK_SIZE, BLOCK_SIZE)
        assert [(origin.node_id, origin.num_blocks) for origin in finished.fetches.fetched] == [("h", 1)]
        await release(service, "before", "a")
        await node.check_idle()
    await holder.close()


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


async def test_a_request_that_is_or_may_become_too_long_leaves_nothing() -> None:
    async with serving(PrefillService, node := make_node()) as service:
        with pytest.raises(InvalidRequestError, match="leaves 2 of 512 tokens for an output, not 3"):
            await anext(prefill(service, "a", [1] * 510))
        with pytest.raises(ContextLengthError):
            await anext(prefill(service, "a", [1] * 513))
        assert await num_leases(service) == 0
        await node.check_idle()


@pytest.mark.parametrize("fetching", [False, True])
async def test_a_stream_that_is_given_up_before_its_first_token_leaves_nothing(fetching: bool) -> None:
    """While it is computed, or while a holder of its first blocks does not answer."""
    connector, runner = LadderConnector(InProcessHub()), GatedRunner()
    connector.hung = {"h"}
    async with serving(PrefillService, node := make_node(runner, connector)) as service, asyncio.timeout(PATIENCE):
        request = prefill_request("a", PROMPT)
        if fetching:
            request.sources.add(source=common_pb2.KVSource(node_id="h", epoch=1, endpoint="h"), num_blocks=2)
        async with aclosing(run(service, request)) as events:
            assert (await anext(events)).HasField("accepted")
            while fetching and not connector.fetches:
                await asyncio.sleep(0)
        assert not service._leases and not node.activity
        runner.gate.set()
        await asyncio.sleep(0)  # the cancelled reception ends
        await asyncio.sleep(0)  # and tells
        await node.check_idle()


async def test_a_reception_that_is_cancelled_before_it_has_begun_unpins_its_blocks() -> None:
    async with serving(PrefillService, node := make_node()) as service, asyncio.timeout(PATIENCE):
        cancelled = asyncio.Event()
        handle = node._handler

        def cancel_at_once(result: StepResult) -> None:
            handle(result)
            if result.reservations:
                reception = service._active["a"].reception
                assert reception is not None
                reception.cancel()
                cancelled.set()

        node._handler = cancel_at_once
        request = prefill_request("a", PROMPT)
        request.sources.add(source=common_pb2.KVSource(node_id="h", epoch=1, endpoint="h"), num_blocks=2)
        async with aclosing(run(service, request)) as events:
            assert (await anext(events)).HasField("accepted")
            await cancelled.wait()
        await node.check_idle()


async def test_a_holder_that_hangs_takes_no_more_than_its_share_of_the_time_left() -> None:
    connector = LadderConnector(InProcessHub())
    connector.hung = {"h"}
    async with serving(PrefillService, node := make_node(connector=connector)) as service, asyncio.timeout(PATIENCE):
        request = prefill_request("a", PROMPT)
        request.timeout_ms = 100
        request.sources.add(source=common_pb2.KVSource(node_id="h", epoch=1, endpoint="h"), num_blocks=2)
        async with aclosing(run(service, request)) as events:
            assert sum([event.HasField("finished") async for event in events]) == 1
        assert connector.timeouts[0] <= 0.05
        await release(service, "a")
        await node.check_idle()


async def test_a_draining_node_takes_no_new_request_nor_does_one_that_has_crashed() -> None:
    async with serving(PrefillService, node := make_node()) as service, asyncio.timeout(PATIENCE):
        await node.drain()
        with pytest.raises(UnavailableError, match="is draining"):
            await anext(prefill(service, "a"))
        node.crashed.set()  # perhaps its engine hangs, and would never answer
        with pytest.raises(UnavailableError, match="has crashed"):
            await anext(prefill(service, "a"))
        assert not service._leases and not node.activity


async def test_a_node_that_stops_ends_its_streams_at_once_and_leaves_nothing() -> None:
    runner = GatedRunner()
    async with serving(PrefillService, node := make_node(runner)) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a")) as events, aclosing(prefill(service, "b")) as others:
            assert (await anext(events)).HasField("accepted")
            accepted = asyncio.ensure_future(anext(others))  # once the engine's step has ended
            while len(service._leases) < 2:
                await asyncio.sleep(0)
            await service.close()
            with pytest.raises(UnavailableError, match="the stream has ended"):
                await anext(events)
            with pytest.raises(UnavailableError, match="the stream has ended"):
                await accepted
            runner.gate.set()
        assert not service._leases and not node.activity
        await node.check_idle()


async def test_a_step_that_fails_ends_its_requests_stream_and_lease() -> None:
    async with serving(PrefillService, node := make_node(FailingRunner())) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a")) as events:
            with pytest.raises(KVRelayError, match="not finite"):
                async for event in events:
                    assert event.HasField("accepted")
        assert not service._leases and not node.activity
        await node.check_idle()


async def test_a_lease_lasts_ten_minutes_at_most_unless_it_is_renewed() -> None:
    """A router that asks for more may be gone before it releases the lease."""
    clock = ManualClock()
    node = make_node()
    async with serving(partial(PrefillService, clock=clock), node) as service, asyncio.timeout(PATIENCE):
        request = prefill_request("a", PROMPT)
        request.lease_ttl_ms = 3_600_000
        async with aclosing(run(service, request)) as events:
            async for _ in events:
                pass
        clock.seconds += 599.0
        await service.RenewLeases(pb.RenewLeasesRequest(lease_ids=["a"], ttl_ms=3_600_000), NO_CONTEXT)
        for seconds, left in ((599.0, ["a"]), (2.0, [])):
            clock.seconds += seconds
            service._leases.sweep()
            assert list(service._leases) == left
        await node.check_idle()


async def test_a_leases_time_begins_when_the_engine_has_taken_the_request() -> None:
    """The engine may be in a step that takes longer, and the router renews only what it has heard of."""
    clock, taking = ManualClock(), threading.Event()
    node = make_node()
    async with serving(partial(PrefillService, clock=clock), node) as service, asyncio.timeout(PATIENCE):
        step = node.engine_thread.call(lambda engine: taking.wait(PATIENCE))
        async with aclosing(prefill(service, "a")) as events:
            accepted = asyncio.ensure_future(anext(events))
            while not service._leases:
                await asyncio.sleep(0)
            clock.seconds += 61.0
            service._leases.sweep()
            taking.set()
            assert await step and (await accepted).HasField("accepted")
            for seconds, left in ((59.0, ["a"]), (2.0, [])):
                clock.seconds += seconds
                service._leases.sweep()
                assert list(service._leases) == left
            async for _ in events:
                pass
        await node.check_idle()


async def test_a_request_that_is_given_up_before_the_engine_has_taken_it_leaves_nothing() -> None:
    taking = threading.Event()
    async with serving(PrefillService, node := make_node()) as service, asyncio.timeout(PATIENCE):
        step = node.engine_thread.call(lambda engine: taking.wait(PATIENCE))
        accepted = asyncio.ensure_future(anext(prefill(service, "a")))
        while not service._leases:
            await asyncio.sleep(0)
        accepted.cancel()
        await asyncio.wait({accepted})
        assert not service._leases and not node.activity
        taking.set()
        assert await step
        await node.check_idle()


async def test_a_router_hears_of_a_lease_before_all_else() -> None:
    """A loop that was busy gets the engine's answer and the first token together."""
    async with serving(PrefillService, node := make_node()) as service, asyncio.timeout(PATIENCE):
        collecting = asyncio.create_task(_all(prefill(service, "a", PROMPT[:10])))
        while not service._leases:
            await asyncio.sleep(0)
        while len(node.engine_thread._calls._calls) < 2:
            time.sleep(0.001)  # noqa: ASYNC251  # the loop is busy
        kinds = [event.WhichOneof("event") for event in await collecting]
        assert kinds[0] == "accepted" and kinds.count("accepted") == 1 and "finished" in kinds
        await release(service, "a")
        await node.check_idle()


async def test_leases_expire_without_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_SWEEP_SECONDS", 0.001)
    async with serving(PrefillService, node := make_node()) as service, asyncio.timeout(PATIENCE):
        request = prefill_request("a", PROMPT)
        request.lease_ttl_ms = 20
        async with aclosing(run(service, request)) as events:
            async for _ in events:
                pass
        while service._leases:
            await asyncio.sleep(0.001)
        assert node.lease_counts.expired == 1
        await node.check_idle()


async def test_an_unforeseen_error_in_a_fetch_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    connector = BrokenConnector(InProcessHub())
    async with serving(PrefillService, node := make_node(connector=connector)) as service, asyncio.timeout(PATIENCE):
        request = prefill_request("a", PROMPT)
        source = common_pb2.KVSource(node_id="p", epoch=1, endpoint="nowhere")
        request.sources.add(source=source, num_blocks=2)
        async with aclosing(run(service, request)) as events:
            assert (await anext(events)).HasField("accepted")
            with pytest.raises(KVRelayError, match="internal error"):
                await anext(events)
        assert "no such case" in caplog.text
        await node.check_idle()
