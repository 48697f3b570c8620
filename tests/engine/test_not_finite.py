"""A fault of the hardware under a prompt: the requests that have read what it left fail, and no others."""

import math
from dataclasses import replace

import pytest

from kvrelay.core.generation.outputs import FinishReason
from kvrelay.core.kv.block_hash import BlockHash, block_hashes
from kvrelay.engine.plan import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, SequenceResult
from kvrelay.engine.request import KVRole
from kvrelay.engine.runner import LaunchedStep
from kvrelay.engine.sampling.sampler import NO_TOKEN, SampledToken
from tests.engine.fake_runner import FakeRunner, expected_output
from tests.engine.finished_step import FinishedStep
from tests.engine.harness import BLOCK_SIZE, NAMESPACE, Harness, move, produce, prompt_of, request

PROMPT = prompt_of(4 * BLOCK_SIZE + 3)
CHUNK = 2 * BLOCK_SIZE


class FaultyRunner(FakeRunner):
    """A runner whose first step writes KV that is not finite. What is computed with it is not finite either."""

    def __init__(self) -> None:
        super().__init__(64, BLOCK_SIZE)
        self.has_fault = True
        self.bad: set[tuple[int, int]] = set()  # (block, slot)

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        output = super().launch(plan).collect()
        for source, target in plan.copies:
            copied = {(target, slot) for block, slot in self.bad if block == source}
            self.bad = {(block, slot) for block, slot in self.bad if block != target} | copied
        results = list(map(self._with_faults, plan.scheduled, output.results))
        self.has_fault = False
        return FinishedStep(ModelRunnerOutput(tuple(results)))

    def _with_faults(self, entry: ScheduledSequence, result: SequenceResult) -> SequenceResult:
        end = entry.start + entry.num_scheduled_tokens
        places = [divmod(position, BLOCK_SIZE) for position in range(end)]
        slots = [(entry.block_table[block], slot) for block, slot in places]
        written = slots[entry.start :]
        if not self.has_fault and self.bad.isdisjoint(slots[: entry.start]):
            self.bad.difference_update(written)
            return result
        self.bad.update(written)
        return replace(result, sampled=tuple(replace(one, token_id=NO_TOKEN) for one in result.sampled))


class UnsureRunner(FakeRunner):
    """A runner that has no log-probability for one token in the middle of a prompt."""

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        output = super().launch(plan).collect()
        for entry, result in zip(plan.scheduled, output.results, strict=True):
            if result.prompt_logprobs is not None and 0 < entry.start < CHUNK + BLOCK_SIZE:
                result.prompt_logprobs.logprobs[3] = math.nan
        return FinishedStep(output)


class SlowRunner(FakeRunner):
    """A runner whose fault shows only in the logits of output 0, after 20 tokens."""

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        output = super().launch(plan).collect()
        results = list(map(self._with_fault, plan.scheduled, output.results))
        return FinishedStep(ModelRunnerOutput(tuple(results)))

    def _with_fault(self, entry: ScheduledSequence, result: SequenceResult) -> SequenceResult:
        shows = any(row.choice_index == 0 and row.num_output_tokens == 20 for row in entry.rows)
        return replace(result, sampled=(SampledToken(NO_TOKEN, None),)) if shows else result


def failed(harness: Harness) -> list[str]:
    return [failure.request_id for result in harness.results for failure in result.failures if failure.is_not_finite]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_what_a_fault_has_left_is_not_found_again(run_ahead: bool) -> None:
    """It was named after the chunk before the one whose logits show it, and offered to be published."""
    harness = Harness(
        run_ahead=run_ahead, wrap=lambda runner: FaultyRunner(), max_num_batched_tokens=CHUNK, publish=True
    )
    for request_id in ("bad", "good"):
        harness.engine.add(request(request_id, PROMPT))
        harness.run()
        assert failed(harness) == (["bad"] if request_id == "bad" else [])
        harness.results.clear()
    assert harness.tokens["good", 0] == expected_output(PROMPT, 8)
    assert harness.retracted, "nor by those who hold it under its name elsewhere"
    harness.engine.check_idle()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_what_others_still_hold_is_not_found_either(run_ahead: bool) -> None:
    """With a popular prefix, somebody always holds it."""
    harness = Harness(
        run_ahead=run_ahead, wrap=lambda runner: FaultyRunner(), max_num_batched_tokens=CHUNK, publish=True
    )
    harness.engine.add(request("bad", PROMPT))
    names: list[BlockHash] = []
    while not names:
        harness.step()
        names = [block.block_hash for result in harness.results for block in result.named]
    harness.engine.add(request("holder", PROMPT, role=KVRole.CONSUME))
    harness.run()
    assert harness.reservation("holder").num_cached_tokens == CHUNK
    harness.engine.add(request("good", PROMPT))
    harness.run()
    assert failed(harness) == ["bad"]
    assert harness.tokens["good", 0] == expected_output(PROMPT, 8)
    told = [name for result in harness.results for name in result.distrusted]
    assert set(names) <= set(told) and len(set(told)) == len(told), "a store has to forget them"
    harness.engine.unpin([block.block_id for block in harness.reservation("holder").missing])
    harness.engine.abort("holder")
    harness.run()
    harness.engine.check_idle()


def test_what_is_being_published_is_not_found_and_is_forgotten_afterwards() -> None:
    harness = Harness(wrap=lambda runner: FaultyRunner(), max_num_batched_tokens=CHUNK, publish=True)
    engine = harness.engine
    engine.add(request("bad", PROMPT))
    pinned = []
    busy = True
    while busy:  # as `Harness.step` does, but for the pins
        result, busy = engine.step()
        pinned += [block.block_id for block in result.named] if result is not None else []
    assert pinned and sorted(harness.retracted) == sorted(pinned), "peers get it no more"
    engine.add(request("good", PROMPT))
    harness.run()
    assert harness.tokens["good", 0] == expected_output(PROMPT, 8), "it has blocks of its own"
    engine.unpin(pinned)
    assert sorted(harness.retracted) == sorted(2 * pinned), "nor what was published since then"
    harness.run()
    engine.check_idle()


def test_a_prefix_that_was_found_before_it_was_distrusted_is_not_offered() -> None:
    """The name is gone, so nobody would withdraw the block before it gets another content."""
    harness = Harness(
        wrap=lambda runner: FaultyRunner(), max_num_batched_tokens=CHUNK, publish=True, publish_hits=True, num_blocks=16
    )
    harness.engine.add(request("bad", PROMPT))
    prefix: set[BlockHash] = set()
    while not prefix:
        harness.step()
        prefix = {block.block_hash for result in harness.results for block in result.named}
    harness.engine.add(replace(request("late", PROMPT, role=KVRole.PRODUCE), receive=True))
    harness.run()
    assert harness.reservation("late").num_cached_tokens == CHUNK
    assert prefix <= {name for result in harness.results for name in result.distrusted}
    harness.engine.unpin([block.block_id for block in harness.reservation("late").missing])
    harness.results.clear()
    harness.engine.start("late")
    harness.run()
    assert not [block for result in harness.results for block in result.named], "nor what is computed behind it"
    assert failed(harness) == ["late"]
    harness.engine.check_idle()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_what_lies_behind_the_failed_request_is_not_found_either(run_ahead: bool) -> None:
    """A longer prompt that begins with the same blocks has left some, and the next one must not swap its own for
    them."""
    harness = Harness(
        run_ahead=run_ahead, wrap=lambda runner: FaultyRunner(), max_num_batched_tokens=CHUNK, publish=True
    )
    harness.engine.add(request("gone", PROMPT))
    while len({block.block_hash for result in harness.results for block in result.named}) < 4:
        harness.step()
    harness.engine.abort("gone")
    harness.engine.add(request("short", PROMPT[: CHUNK + 3]))
    harness.run()
    assert failed(harness) == ["short"]
    named = {block.block_hash for result in harness.results for block in result.named}
    own = block_hashes(NAMESPACE.root(cache_salt=b""), PROMPT[: CHUNK + 3], BLOCK_SIZE, include_partial=True)
    told = {name for result in harness.results for name in result.distrusted}
    assert told == named.union(own), "a store has to forget them"
    harness.engine.add(request("good", PROMPT))
    harness.run()
    assert failed(harness) == ["short"]
    assert harness.tokens["good", 0] == expected_output(PROMPT, 8)
    harness.engine.check_idle()


def test_what_a_preempted_request_has_left_is_not_found_either() -> None:
    """It has no block while it waits, but those that it had are cached under its names."""
    harness = Harness(wrap=lambda runner: FaultyRunner(), max_num_batched_tokens=CHUNK, publish=True)
    harness.engine.add(request("preempted", PROMPT))
    harness.step()
    scheduler = harness.engine._scheduler
    scheduler._preempt(scheduler.running.last())
    named = [block.block_hash for result in harness.results for block in result.named]
    assert named and harness.engine.pool.lookup(named)
    harness.engine.abort("preempted", distrust=True)
    assert not harness.engine.pool.lookup(named)
    harness.engine.check_idle()


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("length", [BLOCK_SIZE - 3, BLOCK_SIZE + 5])
def test_what_an_output_that_has_ended_has_left_is_not_found_either(length: int, run_ahead: bool) -> None:
    """It has read the same KV of the prompt. If that fills no block, nothing else says that the two belong together."""
    prompt = prompt_of(length)
    other = expected_output(prompt, 18, choice_index=1)
    harness = Harness(run_ahead=run_ahead, wrap=lambda runner: SlowRunner(64, BLOCK_SIZE), eos=other[-1:])
    harness.engine.add(request("bad", prompt, 40, n=2))
    harness.run()
    assert harness.finished == {("bad", 1): FinishReason.STOP}
    assert failed(harness) == ["bad"]
    names = block_hashes(NAMESPACE.root(cache_salt=b""), prompt + other, BLOCK_SIZE)
    assert {name for result in harness.results for name in result.distrusted} >= set(names)
    harness.engine.add(request("good", prompt + other))
    harness.run()
    assert harness.cached_tokens("good") == 0
    harness.engine.check_idle()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_prompt_token_without_a_log_probability_fails_its_request(run_ahead: bool) -> None:
    """Its logits were not finite. No token is sampled from them, and none of the following ones depends on them."""
    harness = Harness(
        run_ahead=run_ahead, wrap=lambda runner: UnsureRunner(64, BLOCK_SIZE), max_num_batched_tokens=CHUNK
    )
    plain = request("bad", PROMPT)
    harness.engine.add(replace(plain, sampling=replace(plain.sampling, prompt_logprobs=1)))
    harness.engine.add(request("good", PROMPT))
    harness.run()
    assert failed(harness) == ["bad"]
    assert harness.tokens["good", 0] == expected_output(PROMPT, 8) and not harness.tokens["bad", 0]
    harness.engine.check_idle()


@pytest.mark.parametrize("distrust", [False, True])
def test_what_was_received_is_not_found_after_an_abort_that_distrusts_it(*, distrust: bool) -> None:
    """The node that has computed it has found that it is not finite."""
    prefill, decode = Harness(publish=True), Harness(publish=True)
    produce(prefill, "a", PROMPT)
    decode.engine.add(request("a", PROMPT, role=KVRole.CONSUME))
    decode.step()
    move(prefill, decode, decode.reservation("a"), count=2)
    decode.run()
    received = [block.block_hash for block in decode.reservation("a").missing[:2]]
    assert len(decode.engine.pool.lookup(received)) == 2
    decode.engine.abort("a", distrust=distrust)
    assert len(decode.engine.pool.lookup(received)) == (0 if distrust else 2)
    decode.engine.abort("a", distrust=True)  # it is over
    decode.engine.add(request("b", PROMPT))
    decode.run()
    assert decode.tokens["b", 0] == expected_output(PROMPT, 8)
    assert decode.cached_tokens("b") == (0 if distrust else 2 * BLOCK_SIZE)
    names = block_hashes(NAMESPACE.root(cache_salt=b""), PROMPT, BLOCK_SIZE, include_partial=True)
    told = {name for result in decode.results for name in result.distrusted}
    assert told == (set(names) if distrust else set()), "a store has to forget them, also those that no block here has"
    prefill.engine.release_lease("a")
    for harness in (prefill, decode):
        harness.engine.check_idle()
