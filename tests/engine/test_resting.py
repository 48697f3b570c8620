"""A node that only decodes leaves its cores to prompts that wait on another node, for a part of the time."""

import asyncio

import pytest

from kvrelay.core.process.core_table import CoreShare
from kvrelay.engine.cpu.step_threads import StepThreads
from kvrelay.engine.engine_thread import EngineThread, seconds_to_rest
from kvrelay.engine.request import KVRole
from kvrelay.engine.step_result import StepResult
from tests.engine.harness import Harness, prompt_of, request
from tests.engine.timed_runner import TimedRunner
from tests.manual_clock import ManualClock

PATIENCE = 10.0


def harness_of(share: CoreShare, decode: float) -> Harness:
    """Returns an engine whose steps, which only decode, take `decode` seconds."""
    clock = ManualClock()
    return Harness(
        threads=StepThreads(share), clock=clock, wrap=lambda runner: TimedRunner(runner, clock, decode=decode)
    )


@pytest.mark.parametrize(
    ("step", "rest"),
    [
        (0.009, 0.0),  # not worth it
        (0.011, 0.022),  # twice as long
        (0.030, 0.060),
        (0.040, 0.060),  # ten tokens a second
        (0.090, 0.010),
        (0.150, 0.0),  # which are not to be had
    ],
)
def test_how_long_it_rests_depends_on_how_long_it_took(
    shares: tuple[CoreShare, CoreShare], step: float, rest: float
) -> None:
    ours, other = shares
    harness = harness_of(ours, step)
    harness.engine.add(request("a", prompt_of(20), 10))
    other.claim(prompts_wait=True)
    rests = []
    for _ in range(3):
        harness.step()
        rests.append(seconds_to_rest(harness.engine))
    assert rests == [0.0, pytest.approx(rest), pytest.approx(rest)], "the first step computed a prompt"
    other.claim()
    assert seconds_to_rest(harness.engine) == 0.0
    harness.engine.abort("a")
    harness.step()
    harness.engine.check_idle()


def test_it_does_not_rest_before_a_step_in_flight_is_collected(shares: tuple[CoreShare, CoreShare]) -> None:
    """A prefill node leaves a prompt's step in flight for its KV to be fetched, while the newest one that it has
    collected may have computed a single token."""
    ours, other = shares
    harness = harness_of(ours, 0.030)
    other.claim(prompts_wait=True)
    harness.engine.add(request("short", prompt_of(1), role=KVRole.PRODUCE))
    harness.step()
    harness.step()
    assert seconds_to_rest(harness.engine) == pytest.approx(0.060)
    harness.engine.add(request("long", prompt_of(20, 1), role=KVRole.PRODUCE))
    harness.step()
    assert harness.engine.has_steps_in_flight
    assert seconds_to_rest(harness.engine) == 0.0
    harness.run()
    for request_id in ("short", "long"):
        assert len(harness.tokens[request_id, 0]) == 1
        harness.engine.release_lease(request_id)
    harness.engine.check_idle()


async def test_while_it_rests_others_have_the_cores_and_all_its_tokens_are_told(
    shares: tuple[CoreShare, CoreShare], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = shares
    harness, loop, prompt = harness_of(ours, 0.030), asyncio.get_running_loop(), prompt_of(5)
    rest, crashes, untold = harness.engine.threads.rest, list[BaseException](), list[int]()
    num_told = 0

    def on_result(result: StepResult) -> None:
        nonlocal num_told
        num_told += len(result.outputs)

    def noted_rest() -> None:
        rest()
        num_made = harness.runner.num_computed_tokens - len(prompt) + 1
        # It takes two turns of the loop, as a result does, and so comes after those that were handed over before.
        loop.call_soon_threadsafe(loop.call_soon, lambda: untold.append(max(0, num_made - num_told)))

    monkeypatch.setattr(harness.engine.threads, "rest", noted_rest)
    thread = EngineThread(harness.engine, loop, on_result=on_result, on_crash=crashes.append)
    other.claim(prompts_wait=True)
    thread.start()
    async with asyncio.timeout(PATIENCE):
        await thread.call(lambda engine: engine.add(request("a", prompt, 400)))
        while len(untold) < 4 or other.available() < 2:
            await asyncio.sleep(0)
        await thread.call(lambda engine: engine.abort("a"))  # answered within the rest
        await thread.stop(PATIENCE)
    assert not any(untold)
    assert not crashes
    assert other.available() == 2
    harness.engine.check_idle()
