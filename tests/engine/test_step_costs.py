"""What steps have cost, and the chunks that prompts get beside decodes because of it."""

import math
from dataclasses import replace

import pytest

from kvrelay.core.process.core_table import CoreShare
from kvrelay.engine.cpu.step_threads import StepThreads
from kvrelay.engine.plan import ScheduledSequence, SchedulerOutput
from kvrelay.engine.scheduler import MIXED_TOKENS
from kvrelay.engine.step_costs import StepCosts
from tests.engine.fake_runner import expected_output
from tests.engine.harness import Harness, prompt_of, request
from tests.engine.timed_runner import TimedRunner
from tests.manual_clock import ManualClock


def step(*counts: int) -> SchedulerOutput:
    """Returns a step with a sequence for each count, of which it computes so many tokens."""
    entries = (ScheduledSequence(tuple(range(count)), 0, [], rows=()) for count in counts)
    return SchedulerOutput(tuple(entries), ())


def test_nothing_is_cheap_before_a_prompt_has_followed_a_decode() -> None:
    costs = StepCosts()
    costs.count(step(100), 0.060)
    assert costs.num_cheap_tokens() == 0
    costs.count(step(1, 1), 0.030)
    assert costs.num_cheap_tokens() == 0
    costs.count(step(1, 1, 100), 0.060)
    assert costs.num_cheap_tokens() == 50


def test_prompt_tokens_cost_what_a_step_takes_longer_than_one_that_only_decodes() -> None:
    costs = StepCosts()
    costs.count(step(1), 0.030)
    costs.count(step(200), 0.080)  # reads the weights as well
    assert costs.num_cheap_tokens() == 60


@pytest.mark.parametrize(("decode", "cheap"), [(0.001, 100), (0.020, 100), (0.080, 400)])
def test_ten_milliseconds_more_go_unnoticed(decode: float, cheap: int) -> None:
    costs = StepCosts()
    costs.count(step(1), decode)
    costs.count(step(100), decode + 0.010)
    assert costs.num_cheap_tokens() == pytest.approx(cheap, abs=1)


@pytest.mark.parametrize(("decode", "cheap"), [(0.004, 100), (0.020, 200), (0.080, 800)])
def test_on_borrowed_cores_a_step_may_take_twice_as_long(decode: float, cheap: int) -> None:
    costs = StepCosts()
    costs.count(step(1), decode)
    costs.count(step(100), decode + 0.010)
    assert costs.num_cheap_tokens(on_borrowed_cores=True) == pytest.approx(cheap, abs=1)


def test_steps_of_few_prompt_tokens_say_nothing_about_the_cost_of_one() -> None:
    costs = StepCosts()
    costs.count(step(1), 0.030)
    costs.count(step(1, 15), 0.090)
    assert costs.num_cheap_tokens() == 0


def test_a_step_faster_than_decoding_makes_no_token_free() -> None:
    costs = StepCosts()
    costs.count(step(1), 0.030)
    costs.count(step(64), 0.020)
    assert costs.num_cheap_tokens() == 0


def test_prompts_that_cost_nothing_for_long_leave_the_number_of_cheap_tokens_finite() -> None:
    """Steps that only decode were slow, say because of a neighbour, and none has come since."""
    costs = StepCosts()
    costs.count(step(1), 0.2)
    costs.count(step(100), 0.3)
    prompt = step(20)
    for _ in range(5_500):
        costs.count(prompt, 0.1)
    assert costs.num_cheap_tokens() > 1_000_000


def test_averages_follow_what_steps_cost_now() -> None:
    costs = StepCosts()
    costs.count(step(1), 0.030)
    costs.count(step(1, 100), 0.060)
    costs.count(step(1, 100), 0.130)  # once is hardly anything
    assert 35 < costs.num_cheap_tokens() < 50
    for _ in range(60):
        costs.count(step(1, 100), 0.330)
    assert costs.num_cheap_tokens() == 5


def test_sums_are_of_all_steps_that_compute_prompts() -> None:
    costs = StepCosts()
    costs.count(step(1, 1), 0.030)
    costs.count(step(1, 5), 0.040)
    costs.count(step(30, 20), 0.050)
    assert costs.num_prompt_tokens == 55
    assert costs.prompt_seconds == pytest.approx(0.090)
    assert costs.prompt_tokens_within(0.180) == pytest.approx(110)


def test_nobody_knows_how_long_prompts_take_before_the_first() -> None:
    costs = StepCosts()
    costs.count(step(1, 1), 0.030)
    assert costs.prompt_tokens_within(0.001) == math.inf


def chunks_of(harness: Harness, prompt: str) -> list[int]:
    """Returns how many tokens of a prompt each step computes until its first token, beside one decode."""
    sizes: list[int] = []
    while prompt not in {request_id for request_id, _ in harness.tokens}:
        sizes.append(harness.count_step() - 1)
    return sizes


@pytest.mark.parametrize(
    ("decode", "prompt_token", "limit", "length", "chunks"),
    [
        (0.030, 0.00200, 0, 400, [100, 100, 100, 100]),  # 7 tokens are cheap: a quarter of the prompt
        (0.030, 0.00200, 0, 600, [MIXED_TOKENS - 1] * 4 + [92]),
        (0.030, 0.00012, 0, 400, [125, 125, 125, 25]),
        (0.030, 0.00005, 0, 400, [300, 100]),
        (0.001, 0.00001, 0, 400, [400]),  # a thousand
        (0.001, 0.00001, 100, 400, [99, 99, 99, 99, 4]),
        (0.001, 0.00001, 512, 400, [400]),
    ],
)
def test_beside_decodes_a_prompt_gets_at_least_the_tokens_that_are_cheap_unless_a_limit_is_given(
    decode: float, prompt_token: float, limit: int, length: int, chunks: list[int]
) -> None:
    clock = ManualClock()
    harness = Harness(
        num_blocks=128,
        max_num_batched_tokens=512,
        max_num_mixed_tokens=limit,
        wrap=lambda runner: TimedRunner(runner, clock, decode=decode, prompt_token=prompt_token),
        clock=clock,
    )
    harness.engine.add(request("decode", prompt_of(40), 20))
    harness.step()
    harness.step()
    harness.engine.add(request("before", prompt_of(40, 2), 1))
    while ("before", 0) not in harness.finished:
        harness.step()
    harness.engine.add(request("prompt", prompt_of(length, 1), 2))
    assert chunks_of(harness, "prompt") == chunks
    harness.run()
    assert harness.tokens["prompt", 0] == expected_output(prompt_of(length, 1), 2)
    harness.engine.check_idle()


@pytest.mark.parametrize(
    ("borrowed", "most", "limit", "chunks"),
    [
        (False, 64, 0, [20] * 4 + [10]),
        (True, 64, 0, [40, 40, 10]),
        (True, 40, 0, [39, 39, 12]),  # a step has no more
        (False, 64, 48, [23, 23, 23, 21]),  # a quarter of it, as with any prompt
    ],
)
def test_a_prompt_that_yields_to_decodes_gets_the_tokens_that_are_cheap_and_no_more_unless_a_limit_is_given(
    shares: tuple[CoreShare, CoreShare], borrowed: bool, most: int, limit: int, chunks: list[int]
) -> None:
    ours, other = shares
    clock = ManualClock()
    harness = Harness(
        max_num_batched_tokens=most,
        max_num_mixed_tokens=limit,
        wrap=lambda runner: TimedRunner(runner, clock, decode=0.020, prompt_token=0.00049),
        clock=clock,
        threads=StepThreads(ours),
    )
    other.claim()
    harness.engine.add(request("decode", prompt_of(40), 20))
    harness.step()
    harness.step()
    harness.engine.add(request("before", prompt_of(16, 2), 1))
    harness.step()
    if borrowed:
        other.release()
    harness.engine.add(replace(request("prompt", prompt_of(90, 1), 2), yields_to_decodes=True))
    assert chunks_of(harness, "prompt") == chunks
    harness.run()
    harness.engine.check_idle()
