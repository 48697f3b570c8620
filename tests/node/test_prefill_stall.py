"""When a prefill node ends leases early: requests wait for blocks that they hold, and nothing else lets these go on."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

from kvrelay.engine.step_result import EngineLoad
from prefill_node.service import PrefillService
from prefill_node.stall import StallWatch
from tests.node.fake_node import GatedRunner, make_node, serving
from tests.node.prefill_calls import PATIENCE, PROMPT, prefill, release


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
            for _ in range(11):
                service._leases.sweep()
                await node.engine_thread.call(lambda engine: None)
            assert list(service._leases) == ["b"]
            rest = [event async for event in events]
        assert sum(event.HasField("finished") for event in rest) == 1
        await release(service, "b")
        await node.check_idle()


async def test_no_lease_ends_early_unless_nothing_else_lets_those_who_wait_proceed() -> None:
    """That is, unless requests wait for long, none runs, no step is made and no lease is released; and none whose
    stream is under way."""
    runner = GatedRunner()
    runner.gate.set()
    async with serving(PrefillService, node := make_node(runner)) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a")) as events:
            async for _ in events:
                pass
        idle = node.event_log.load
        stalled = replace(idle, num_requests_waiting=1)
        for sweeps in (
            [idle] * 12,
            [replace(stalled, num_requests_running=1)] * 12,
            [replace(stalled, num_steps=idle.num_steps + number) for number in range(1, 13)],
        ):
            for load in sweeps:
                service._end_stall(load)
        for _ in range(3):
            for _ in range(9):
                service._end_stall(sweeps[-1])
            node.lease_counts.released += 1  # as when a decode node takes what it has found no place for until now
            service._end_stall(sweeps[-1])
        assert list(service._leases) == ["a"]
        for _ in range(10):
            service._end_stall(sweeps[-1])
        assert not service._leases and node.lease_counts.ended_early == 1
        runner.gate.clear()
        async with aclosing(prefill(service, "b", PROMPT[:10])) as events:
            assert (await anext(events)).HasField("accepted")
            for _ in range(12):
                service._end_stall(stalled)
            assert list(service._leases) == ["b"]
            runner.gate.set()
        await release(service, "b")
        await node.check_idle()


async def test_the_oldest_lease_ends_when_one_request_has_lacked_room_for_long_while_others_overtake_it() -> None:
    """And the next one only after as long again."""
    async with serving(PrefillService, node := make_node()) as service, asyncio.timeout(PATIENCE):
        for lease_id in ("a", "b"):
            async with aclosing(prefill(service, lease_id)) as events:
                async for _ in events:
                    pass
        idle = node.event_log.load
        # None lacks room for long, then one does, then another, then one that came before both, and that one for long.
        for number, arrival in enumerate([0] * 12 + [7] * 9 + [8] * 9 + [6] * 21, start=1):
            assert list(service._leases) == (["a", "b"] if number <= 41 else ["b"])
            load = replace(idle, num_requests_waiting=1, num_requests_running=1, first_lacking=arrival)
            service._end_stall(replace(load, num_steps=idle.num_steps + number))
        assert not service._leases and node.lease_counts.ended_early == 2
        await node.check_idle()


async def test_a_step_that_takes_long_is_no_stall() -> None:
    """What the engine has reported last may be from before it, when the prompt that it computes still waited."""
    runner = GatedRunner()
    runner.gate.set()
    async with serving(PrefillService, node := make_node(runner)) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a")) as events:
            async for _ in events:
                pass
        before = replace(node.event_log.load, num_requests_waiting=1)
        runner.gate.clear()
        async with aclosing(prefill(service, "b", [2] * 40)) as events:
            assert (await anext(events)).HasField("accepted")
            node.event_log.append([], [], before)
            for _ in range(12):
                service._leases.sweep()
            runner.gate.set()
            rest = [event async for event in events]
        assert sum(event.HasField("finished") for event in rest) == 1
        assert list(service._leases) == ["a", "b"]
        await release(service, "a", "b")
        await node.check_idle()


def test_a_look_in_the_middle_of_a_step_finds_no_stall() -> None:
    """The load counts a step when it is launched, and the prompt that it completes runs until it is collected."""
    watch = StallWatch()
    launched = EngineLoad(num_requests_waiting=1, num_requests_running=1, num_steps=3)
    collected = replace(launched, num_requests_running=0)
    assert not any(watch.is_stalled(load, 0) for load in [launched, collected] * 12)
    assert [watch.is_stalled(collected, 0) for _ in range(12)] == [False] * 9 + [True] * 3, (
        "only at first with patience"
    )
    assert [watch.is_stalled(collected, 1) for _ in range(11)] == [False] * 10 + [True], "a lease was released"
