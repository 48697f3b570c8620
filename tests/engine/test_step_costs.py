"""What steps have cost, and the chunks that prompts get beside decodes because of it."""

import math
from dataclasses import replace
from itertools import product

import pytest

from kvrelay.core.process.core_table import CoreShare
from kvrelay.engine.cpu.step_threads import StepThreads
from kvrelay.engine.plan import ScheduledSequence, SchedulerOutput
from kvrelay.engine.step_budget import MIXED_TOKENS
from kvrelay.engine.step_costs import MIXED_STEPS, StepCosts
from tests.engine.fake_runner import expected_output
from tests.engine.harness import Harness, prompt_of, request
from tests.engine.timed_runner import TimedRunner
from tests.manual_clock import ManualClock


def step(*counts: int) -> SchedulerOutput:
    """Returns a step with a sequence for each count, of which it computes so many tokens."""
    entries = (ScheduledSequence(tuple(range(count)), 0, [], rows=()) for count in counts)
    return SchedulerOutput(tuple(entries), ())


def taught(costs: StepCosts, *, reading: float, decode: float, prompt_token: float, rounds: int = 20) -> StepCosts:
    """Counts steps that all compute prompts beside decodes, as at a node where prompts always wait. They take `reading`
    seconds, and `decode` and `prompt_token` for each decode and token."""
    for num_decodes, num_tokens in list(product((1, 4, 16), (16, 64, 256))) * rounds:
        costs.count(step(*[1] * num_decodes, num_tokens), reading + decode * num_decodes + prompt_token * num_tokens)
    return costs


def test_nothing_is_cheap_before_the_first_step_that_took_time() -> None:
    costs = StepCosts()
    assert costs.num_cheap_tokens(1, 0) == 0
    costs.count(step(100), 0.0)
    assert costs.num_cheap_tokens(1, 0) == 0
    costs.count(step(100), 0.060)
    assert costs.num_cheap_tokens(1, 0) > 0


@pytest.mark.parametrize("num_decodes", [1, 8, 16])
@pytest.mark.parametrize(
    ("reading", "decode", "prompt_token"),
    [(0.036, 0.0003, 0.00045), (0.080, 0.0040, 0.00450), (0.008, 0.0002, 0.00015), (0.030, 0.0010, 0.00010)],
)
def test_the_tokens_that_make_a_step_half_as_long_again_are_known_without_one_that_only_decodes(
    num_decodes: int, reading: float, decode: float, prompt_token: float
) -> None:
    costs = taught(StepCosts(), reading=reading, decode=decode, prompt_token=prompt_token)
    half = max(0.010, (reading + decode * num_decodes) / 2)
    assert costs.num_cheap_tokens(num_decodes, 0) == pytest.approx(half / prompt_token, rel=0.2)


@pytest.mark.parametrize("reading", [0.001, 0.004, 0.010])
def test_ten_milliseconds_more_go_unnoticed(reading: float) -> None:
    costs = taught(StepCosts(), reading=reading, decode=0.0001, prompt_token=0.0001)
    assert costs.num_cheap_tokens(1, 0) == pytest.approx(100, rel=0.15)


def test_on_borrowed_cores_a_step_may_take_twice_as_long() -> None:
    costs = taught(StepCosts(), reading=0.080, decode=0.001, prompt_token=0.001)
    assert costs.num_cheap_tokens(8, 0, on_borrowed_cores=True) == pytest.approx(88, rel=0.15)
    cheap = StepCosts.num_cheap_tokens
    assert cheap(costs, 8, 0, on_borrowed_cores=True) == pytest.approx(2 * cheap(costs, 8, 0), abs=1)


@pytest.mark.parametrize(
    ("num_queued", "halves"),
    [(0, 1), (4, 1), (6, 1.5), (8, 2), (16, 4), (32, 8), (33, 8), (1_000, 8)],
)
def test_the_more_prompts_are_queued_for_each_decode_the_longer_a_step_may_take(num_queued: int, halves: float) -> None:
    costs = taught(StepCosts(), reading=0.080, decode=0.001, prompt_token=0.001)
    half = costs.num_cheap_tokens(16, 0)
    assert costs.num_cheap_tokens(16, num_queued) == pytest.approx(half * halves, abs=halves)
    borrowed = costs.num_cheap_tokens(16, num_queued, on_borrowed_cores=True)
    assert borrowed == pytest.approx(half * max(2, halves), abs=halves)


def test_after_many_steps_that_do_both_one_is_to_decode_only() -> None:
    costs = StepCosts()
    for counts in [(1, 20)] * (MIXED_STEPS - 1) + [(20,)] + [(1, 20)] * (MIXED_STEPS - 1) + [(1, 1)]:
        costs.count(step(*counts), 0.040)
        assert not costs.need_decode_step()
    for _ in range(MIXED_STEPS):
        assert not costs.need_decode_step()
        costs.count(step(1, 20), 0.040)
    assert costs.need_decode_step()
    costs.count(step(1, 1), 0.030)
    assert not costs.need_decode_step()


@pytest.mark.parametrize("reading", [0.002, 0.030])
def test_one_step_that_something_held_up_changes_little(reading: float) -> None:
    costs = taught(StepCosts(), reading=reading, decode=0.0002, prompt_token=0.0002)
    before = costs.num_cheap_tokens(8, 0)
    costs.count(step(*[1] * 8, 64), 30.0)
    assert costs.num_cheap_tokens(8, 0) > before * 0.6
    costs.count(step(*[1] * 8, 64), 1e-6)
    assert costs.num_cheap_tokens(8, 0) < before * 1.6


def test_the_model_follows_what_steps_cost_now() -> None:
    costs = taught(StepCosts(), reading=0.030, decode=0.001, prompt_token=0.0004)
    taught(costs, reading=0.030, decode=0.001, prompt_token=0.0040)
    assert costs.num_cheap_tokens(10, 0) == pytest.approx(5, abs=1)


@pytest.mark.parametrize("seconds", [1e-9, 1e3])
def test_however_fast_or_slow_steps_are_the_number_of_cheap_tokens_is_finite(seconds: float) -> None:
    costs = taught(StepCosts(), reading=0.1, decode=0.01, prompt_token=0.01, rounds=1)
    for counts in [(20,), (1,), (1, 100)] * 2_000:
        costs.count(step(*counts), seconds)
    assert 1 <= costs.num_cheap_tokens(1, 0) < 10**12


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


def chunks_of(harness: Harness, prompt: str, *, num_decodes: int) -> list[int]:
    """Returns how many tokens of a prompt each step computes until its first token, beside so many decodes."""
    sizes: list[int] = []
    while prompt not in {request_id for request_id, _ in harness.tokens}:
        sizes.append(harness.count_step() - num_decodes)
    return sizes


@pytest.mark.parametrize(
    ("decode", "prompt_token", "limit", "length", "largest", "num_chunks"),
    [
        (0.030, 0.00200, 0, 400, 100, 4),  # 7 tokens are cheap: a quarter of the prompt
        (0.030, 0.00200, 0, 600, MIXED_TOKENS - 1, 5),
        (0.060, 0.00020, 0, 400, 150, 3),
        (0.060, 0.00010, 0, 400, 300, 2),
        (0.001, 0.00001, 0, 400, 400, 1),  # a thousand
        (0.001, 0.00001, 100, 400, 99, 5),
        (0.060, 0.00020, 300, 400, 100, 4),  # a quarter, though more are cheap
        (0.060, 0.00020, 512, 400, 400, 1),
    ],
)
def test_beside_decodes_a_prompt_gets_at_least_the_tokens_that_are_cheap_unless_a_limit_is_given(
    decode: float, prompt_token: float, limit: int, length: int, largest: int, num_chunks: int
) -> None:
    clock = ManualClock()
    harness = Harness(
        num_blocks=128,
        max_num_batched_tokens=512,
        max_num_mixed_tokens=limit,
        wrap=lambda runner: TimedRunner(runner, clock, decode=decode, prompt_token=prompt_token),
        clock=clock,
    )
    taught(harness.engine.costs, reading=decode, decode=0.0, prompt_token=prompt_token)
    harness.engine.add(request("decode", prompt_of(40), 20))
    harness.step()
    harness.engine.add(request("prompt", prompt_of(length, 1), 2))
    chunks = chunks_of(harness, "prompt", num_decodes=1)
    assert len(chunks) == num_chunks and max(chunks) == pytest.approx(largest, rel=0.2)
    harness.run()
    assert harness.tokens["prompt", 0] == expected_output(prompt_of(length, 1), 2)
    harness.engine.check_idle()


@pytest.mark.parametrize(
    ("borrowed", "most", "limit", "largest"),
    [
        (False, 64, 0, 20),
        (True, 64, 0, 40),
        (True, 40, 0, 39),  # a step has no more
        (False, 64, 48, 30),  # a quarter of it, as with any prompt
    ],
)
def test_a_prompt_that_yields_to_decodes_gets_the_tokens_that_are_cheap_and_no_more_unless_a_limit_is_given(
    shares: tuple[CoreShare, CoreShare], borrowed: bool, most: int, limit: int, largest: int
) -> None:
    ours, other = shares
    clock = ManualClock()
    harness = Harness(
        num_blocks=64,
        max_num_batched_tokens=most,
        max_num_mixed_tokens=limit,
        wrap=lambda runner: TimedRunner(runner, clock, decode=0.020, prompt_token=0.0005),
        clock=clock,
        threads=StepThreads(ours),
    )
    taught(harness.engine.costs, reading=0.020, decode=0.0, prompt_token=0.0005)
    other.claim()
    for number in range(4):
        harness.engine.add(request(f"decode {number}", prompt_of(16, 2 + number), 20))
    while len(harness.tokens) < 4:
        harness.step()
    if borrowed:
        other.release()
    harness.engine.add(replace(request("prompt", prompt_of(120, 1), 2), yields_to_decodes=True))
    assert max(chunks_of(harness, "prompt", num_decodes=4)) == pytest.approx(largest, rel=0.15)
    harness.run()
    harness.engine.check_idle()


def busy_engine(num_decodes: int, *, num_places: int = 128) -> Harness:
    """Returns an engine in which sequences decode. A step takes 40 ms, 1 ms for each decode, and 0.5 ms for each token
    of a prompt."""
    clock = ManualClock()
    harness = Harness(
        num_blocks=1024,
        max_num_seqs=num_places,
        max_num_batched_tokens=512,
        max_num_mixed_tokens=0,
        policy="priority",
        wrap=lambda runner: TimedRunner(runner, clock, decode=0.040, each_decode=0.001, prompt_token=0.0005),
        clock=clock,
    )
    taught(harness.engine.costs, reading=0.040, decode=0.001, prompt_token=0.0005)
    for number in range(num_decodes):
        harness.engine.add(request(f"decode {number}", prompt_of(8, number), 400))
    for _ in range(8):
        harness.step()
    return harness


@pytest.mark.parametrize(
    ("num_places", "priority", "yields", "times"),
    [
        (128, 0, False, 4),
        (128, 1, False, 0.5),  # less urgent than all decodes
        (128, 0, True, 0.5),
        (7, 0, False, 1),  # two of the prompts could begin behind the first
        (5, 0, False, 0.5),
    ],
)
def test_only_prompts_that_could_decode_sooner_make_steps_longer(
    num_places: int, priority: int, yields: bool, times: float
) -> None:
    harness = busy_engine(4, num_places=num_places)
    for number in range(20):
        prompt = request(f"prompt {number}", prompt_of(150, 4 + number), 2, priority=priority)
        harness.engine.add(replace(prompt, yields_to_decodes=yields))
    assert harness.count_step() == pytest.approx(4 + 0.044 * times / 0.0005, rel=0.15)
    harness.run()
    harness.engine.check_idle()


@pytest.mark.parametrize(("first_priority", "priority", "yields"), [(0, 0, True), (0, 1, False), (1, 1, False)])
def test_prompts_that_may_not_delay_all_decodes_do_not_make_steps_longer_behind_one_that_may(
    first_priority: int, priority: int, yields: bool
) -> None:
    """Nor because one of those that decode is as little urgent as they are."""
    harness = busy_engine(3)
    harness.engine.add(request("less urgent", prompt_of(8, 3), 400, priority=1))
    for _ in range(2):
        harness.step()
    harness.engine.add(request("first", prompt_of(150, 4), 2, priority=first_priority))
    for number in range(20):
        prompt = request(f"prompt {number}", prompt_of(150, 5 + number), 2, priority=priority)
        harness.engine.add(replace(prompt, yields_to_decodes=yields))
    assert harness.count_step() == pytest.approx(4 + 0.044 * 0.5 / 0.0005, rel=0.15)
    harness.run()
    harness.engine.check_idle()


@pytest.mark.parametrize(
    ("limit", "sizes"), [(0, [64] * MIXED_STEPS + [1] + [64] * MIXED_STEPS + [1]), (40, [40] * 34)]
)
def test_a_step_decodes_only_after_many_that_did_both_unless_a_limit_is_given(limit: int, sizes: list[int]) -> None:
    harness = Harness(num_blocks=512, max_num_batched_tokens=64, max_num_mixed_tokens=limit, clock=ManualClock())
    harness.engine.add(request("decode", prompt_of(8), 100))
    harness.step()
    harness.engine.add(request("prompt", prompt_of(3000, 1), 1))
    assert [harness.count_step() for _ in sizes] == sizes
    harness.run()
    harness.engine.check_idle()


def test_a_step_in_which_prompts_were_put_off_is_none_of_a_node_that_only_decodes() -> None:
    costs = StepCosts()
    for _ in range(MIXED_STEPS):
        costs.count(step(1, 20), 0.040)
    costs.count(step(1), 0.030)
    assert costs.newest_decode == 0.0
    costs.count(step(1), 0.030)
    assert costs.newest_decode == 0.030


def num_steps_until_none_waits(harness: Harness) -> int:
    num_steps = 0
    while harness.engine.load().num_requests_waiting:
        harness.step()
        num_steps += 1
    return num_steps


def test_few_decodes_do_not_hold_up_many_prompts() -> None:
    """If steps stayed as short as beside few prompts, the prompts' decodes would end as fast as others began."""
    harness = busy_engine(4)
    for number in range(60):
        harness.engine.add(request(f"prompt {number}", prompt_of(64, 4 + number), 40))
    assert num_steps_until_none_waits(harness) < 50  # with four quarters of each prompt it is more than 200
    assert harness.engine.load().num_requests_decoding > 50
    harness.run()
    harness.engine.check_idle()


def test_prompts_that_wait_beside_ever_more_decodes_get_what_is_cheap_now() -> None:
    """Decoding takes three times as long as when it was last done alone. The difference is not the prompts'."""
    harness = busy_engine(1)
    for number in range(80):
        harness.engine.add(request(f"more {number}", prompt_of(8, number), 400))
    for number in range(20):
        prompt = replace(request(f"prompt {number}", prompt_of(64, 100 + number), 2), yields_to_decodes=True)
        harness.engine.add(prompt)
    assert num_steps_until_none_waits(harness) < 40  # with the smallest chunks it is 80 and more
    harness.run()
    harness.engine.check_idle()


def test_what_a_token_costs_is_corrected_though_all_steps_with_prompts_are_alike() -> None:
    """A part of what seems to be the cost of the tokens is that of decodes, and the sum is right."""
    costs = StepCosts()
    for _ in range(30):
        costs.count(step(1), 0.041)
    for _ in range(30):
        costs.count(step(*[1] * 80, 16), 0.128)
    assert costs.num_cheap_tokens(80, 0) < 80
    for _ in range(400):
        num_tokens = 0 if costs.need_decode_step() else max(16, costs.num_cheap_tokens(80, 0))
        costs.count(step(*[1] * 80, *[num_tokens] * (num_tokens > 0)), 0.120 + 0.0005 * num_tokens)
    assert costs.num_cheap_tokens(80, 0) == pytest.approx(120, rel=0.2)
