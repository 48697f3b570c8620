"""Requests whose KV moves between engines: no token is computed twice, and leases keep what was published."""

import asyncio
import threading
from dataclasses import replace

import pytest

from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.kv.block_hash import block_hashes
from kvrelay.engine.engine_thread import EngineThread
from kvrelay.engine.plan import ModelRunnerOutput, SchedulerOutput
from kvrelay.engine.request import KVRole
from kvrelay.engine.runner import LaunchedStep, Runner
from kvrelay.engine.step_result import StepResult
from tests.engine.fake_runner import expected_output
from tests.engine.harness import BLOCK_SIZE, NAMESPACE, Harness, first_tokens, move, produce, prompt_of, request

PATIENCE = 10.0


@pytest.mark.parametrize("length", [1, 8, 15, 16, 17, 100])
@pytest.mark.parametrize("n", [1, 3])
def test_prefill_here_and_decode_there_recomputes_no_token(length: int, n: int) -> None:
    prefill, decode = Harness(publish=True, max_num_batched_tokens=32), Harness(publish=True)
    prompt = prompt_of(length)
    produce(prefill, "a", prompt, n)
    decode.engine.add(request("a", prompt, 8, role=KVRole.CONSUME, n=n))
    decode.step()
    move(prefill, decode, decode.reservation("a"))
    prefill.engine.release_lease("a")
    starts = first_tokens(prefill, "a")
    decode.engine.start("a", starts)
    decode.run()
    for index in range(n):
        tokens = [*starts[index].token_ids, *decode.tokens["a", index]]
        assert tokens == expected_output(prompt, 8, choice_index=index)
    assert decode.runner.num_computed_tokens == 7 * n
    prefill.engine.check_idle()
    decode.engine.check_idle()


@pytest.mark.parametrize(("length", "num_missing"), [(40, 2), (44, 3)])
def test_a_decode_engine_waits_for_those_blocks_only_that_it_does_not_hold(length: int, num_missing: int) -> None:
    prefill, decode = Harness(publish=True), Harness()
    prompt = prompt_of(length)
    produce(prefill, "a", prompt)
    decode.engine.add(request("before", prompt[:24], 1))
    decode.run()
    decode.engine.add(request("a", prompt, 8, role=KVRole.CONSUME))
    decode.step()
    assert decode.engine.load().num_free_blocks == 64 - 3 - num_missing
    reservation = decode.reservation("a")
    assert (reservation.num_cached_tokens, len(reservation.missing)) == (24, num_missing)
    move(prefill, decode, reservation)
    decode.engine.start("a", first_tokens(prefill, "a"))
    decode.run()
    assert decode.runner.num_computed_tokens == 24 + 7
    assert decode.tokens["a", 0] == expected_output(prompt, 8)[1:]
    decode.engine.check_idle()


def test_an_output_that_ended_with_its_first_token_does_not_continue() -> None:
    prefill, decode = Harness(publish=True), Harness(publish=True)
    prompt = prompt_of(20)
    produce(prefill, "a", prompt, 2)
    decode.engine.add(request("a", prompt, 8, role=KVRole.CONSUME, n=2))
    decode.step()
    move(prefill, decode, decode.reservation("a"))
    prefill.engine.release_lease("a")
    going_on, ended = first_tokens(prefill, "a")
    decode.engine.start("a", [going_on, replace(ended, finish_reason=FinishReason.STOP)])
    decode.run()
    assert set(decode.tokens) == {("a", 0)}
    assert [*going_on.token_ids, *decode.tokens["a", 0]] == expected_output(prompt, 8)
    decode.engine.check_idle()


def test_what_does_not_arrive_is_computed_by_the_decode_engine() -> None:
    prefill, decode = Harness(publish=True), Harness(publish=True)
    prompt = prompt_of(50)
    produce(prefill, "a", prompt)
    decode.engine.add(request("a", prompt, 8, role=KVRole.CONSUME))
    decode.step()
    move(prefill, decode, decode.reservation("a"), count=2)
    decode.engine.start("a", first_tokens(prefill, "a"))
    decode.run()
    assert [*first_tokens(prefill, "a")[0].token_ids, *decode.tokens["a", 0]] == expected_output(prompt, 8)
    assert decode.runner.num_computed_tokens == 50 - 16 + 7
    decode.engine.check_idle()


def test_log_probabilities_of_a_prompt_are_not_computed_again_where_it_is_decoded() -> None:
    prefill, decode = Harness(publish=True), Harness()
    prompt = prompt_of(50)
    produce(prefill, "a", prompt)
    consumer = request("a", prompt, 8, role=KVRole.CONSUME)
    decode.engine.add(replace(consumer, sampling=replace(consumer.sampling, prompt_logprobs=1)))
    decode.step()
    move(prefill, decode, decode.reservation("a"), count=2)
    decode.engine.start("a", first_tokens(prefill, "a"))
    decode.run()
    assert decode.runner.num_computed_tokens == 50 - 16 + 7
    assert decode.runner.num_prompt_logprobs == 0
    decode.engine.check_idle()


@pytest.mark.parametrize("length", [48, 50])
@pytest.mark.parametrize("num_arrived", [0, 2, 5])
def test_what_does_not_arrive_is_computed_once_for_all_outputs(num_arrived: int, length: int) -> None:
    prefill, decode = Harness(publish=True), Harness(publish=True, max_num_batched_tokens=16)
    prompt = prompt_of(length)
    produce(prefill, "a", prompt, 3)
    decode.engine.add(request("a", prompt, 8, role=KVRole.CONSUME, n=3))
    decode.step()
    move(prefill, decode, decode.reservation("a"), count=num_arrived)
    starts = first_tokens(prefill, "a")
    decode.engine.start("a", starts)
    decode.run()
    for index in range(3):
        tokens = [*starts[index].token_ids, *decode.tokens["a", index]]
        assert tokens == expected_output(prompt, 8, choice_index=index)
    assert decode.runner.num_computed_tokens == length - num_arrived * BLOCK_SIZE + 3 * 7
    assert not any(result.prompts for result in decode.results), "the prefill engine has reported the prompt"
    decode.engine.check_idle()


def test_outputs_whose_prompt_is_being_computed_survive_preemption() -> None:
    """Another request has computed all of that prompt when it goes on."""
    prefill, decode = Harness(publish=True), Harness(num_blocks=26, max_num_batched_tokens=4)
    prompt = prompt_of(48)
    decode.engine.add(request("before", prompt_of(4, 1), 120))
    while len(decode.tokens["before", 0]) < 72:
        decode.step()
    for request_id in ("a", "b"):
        produce(prefill, request_id, prompt, 2)
        decode.engine.add(request(request_id, prompt, 8, role=KVRole.CONSUME, n=2))
    decode.step()
    for request_id in ("a", "b"):
        move(prefill, decode, decode.reservation(request_id), count=0)
        decode.engine.start(request_id, first_tokens(prefill, request_id))
    while not decode.engine.load().num_preemptions:
        assert len(decode.engine._sequences["b"]) == 1, "its outputs wait for the prompt"
        decode.step()
    decode.run()
    for request_id in ("a", "b"):
        for index, start in enumerate(first_tokens(prefill, request_id)):
            tokens = [*start.token_ids, *decode.tokens[request_id, index]]
            assert tokens == expected_output(prompt, 8, choice_index=index)
    assert decode.tokens["before", 0] == expected_output(prompt_of(4, 1), 120)
    decode.engine.check_idle()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_the_last_blocks_can_be_fetched_before_the_first_token_is_sampled(*, is_aborted: bool) -> None:
    """Nor does the first token wait for what others compute."""
    harness = Harness(publish=True)
    harness.engine.add(request("a", prompt_of(50), role=KVRole.PRODUCE))
    assert harness.step()
    [written] = harness.results
    assert (written.progress, len(written.named), written.outputs) == ((("a", 7),), 7, ())
    if is_aborted:
        harness.engine.abort("a")
    harness.engine.add(request("other", prompt_of(50, 1), 1))
    assert harness.count_step() == 0
    sampled = harness.results[-1]
    assert (len(sampled.outputs), sampled.progress, sampled.named) == (not is_aborted, (), ())
    harness.run()
    harness.engine.release_lease("a")
    harness.engine.check_idle()


class SamplesOnceOpen:
    """A runner around `inner`, and its step, whose sampling waits until `gate` is open."""

    only_samples = True

    def __init__(self, inner: Runner, gate: threading.Event) -> None:
        self._inner = inner
        self._gate = gate

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        self._step = self._inner.launch(plan)
        return self

    def collect(self) -> ModelRunnerOutput:
        assert self._gate.wait(PATIENCE), "nobody was told of the blocks"
        return self._step.collect()


async def test_others_are_told_of_the_last_blocks_before_the_first_token_is_sampled() -> None:
    told, sampled, crashes = threading.Event(), asyncio.Event(), list[BaseException]()
    harness = Harness(publish=True, wrap=lambda runner: SamplesOnceOpen(runner, told))

    def on_result(result: StepResult) -> None:
        thread.post(lambda engine: engine.unpin([block.block_id for block in result.named]))
        if result.progress:
            told.set()
        if result.outputs:
            sampled.set()

    def on_crash(error: BaseException) -> None:
        crashes.append(error)
        sampled.set()

    thread = EngineThread(harness.engine, asyncio.get_running_loop(), on_result=on_result, on_crash=on_crash)
    thread.start()
    async with asyncio.timeout(2 * PATIENCE):
        thread.post(lambda engine: engine.add(request("a", prompt_of(20), role=KVRole.PRODUCE)))
        await sampled.wait()
        await thread.call(lambda engine: engine.release_lease("a"))
        await thread.stop(PATIENCE)
    assert not crashes
    harness.engine.check_idle()


def test_a_prompt_counts_as_far_as_it_is_written_when_the_step_completes_another_one() -> None:
    harness = Harness(publish=True, max_num_batched_tokens=32)
    for number, request_id in enumerate(("a", "b")):
        harness.engine.add(request(request_id, prompt_of(20, number), role=KVRole.PRODUCE))
    harness.step()
    [written] = harness.results
    assert (written.progress, len(written.named), written.outputs) == ((("a", 3), ("b", 1)), 4, ())
    harness.run()
    assert [progress for result in harness.results[1:] for progress in result.progress] == [("b", 3)]
    for number, request_id in enumerate(("a", "b")):
        assert harness.tokens[request_id, 0] == expected_output(prompt_of(20, number), 1)
        harness.engine.release_lease(request_id)
    harness.engine.check_idle()


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("length", [48, 50])
def test_progress_counts_published_blocks_chunk_by_chunk(length: int, *, run_ahead: bool) -> None:
    """Whether or not the tail is partial; no block is begun for a token that is computed elsewhere."""
    harness = Harness(publish=True, max_num_batched_tokens=16, run_ahead=run_ahead)
    produce(harness, "a", prompt_of(length))
    progress = [count for result in harness.results for _, count in result.progress]
    assert progress == ([2, 4, 6] if length == 48 else [2, 4, 6, 7])  # a partial tail counts as one
    harness.results.clear()
    harness.engine.add(request("b", prompt_of(length, 1)))
    harness.run()
    assert not any(result.progress for result in harness.results), "nobody waits for blocks of this one"
    harness.engine.release_lease("a")
    harness.engine.check_idle()


def test_a_preempted_request_finds_what_it_has_generated_here() -> None:
    prefill, decode = Harness(publish=True), Harness(num_blocks=7)
    prompt = prompt_of(8)
    produce(prefill, "a", prompt)
    decode.engine.add(request("before", prompt_of(9, 1), 24))
    decode.engine.add(request("a", prompt, 40, role=KVRole.CONSUME))
    decode.step()
    move(prefill, decode, decode.reservation("a"))
    decode.engine.start("a", first_tokens(prefill, "a"))
    while decode.engine.load().num_preemptions == 0:
        assert decode.step()
    assert len(decode.tokens["a", 0]) == 2 * BLOCK_SIZE
    while ("a", 0) not in decode.finished:
        assert decode.count_step() <= BLOCK_SIZE
    assert [*first_tokens(prefill, "a")[0].token_ids, *decode.tokens["a", 0]] == expected_output(prompt, 40)
    decode.engine.check_idle()


def test_a_lease_keeps_published_blocks_until_it_is_released() -> None:
    harness = Harness(num_blocks=8, publish=True)
    prompt = prompt_of(30)
    produce(harness, "a", prompt)
    harness.engine.add(request("b", prompt_of(30, 9), 3))
    harness.run()
    names = harness.engine.pool.num_blocks - harness.engine.pool.num_free
    assert names == 4, "the lease's four blocks are still held"
    harness.engine.release_lease("a")
    harness.engine.release_lease("a")
    harness.engine.check_idle()


def test_a_lease_keeps_the_blocks_that_took_the_place_of_those_that_its_request_computed() -> None:
    """Two requests compute one prompt at the same time, and the second one has a block half full when the first one
    names its own."""
    harness = Harness(num_blocks=8, publish=True, max_num_batched_tokens=32)
    prompt = prompt_of(20)
    for request_id in ("a", "b"):
        harness.engine.add(request(request_id, prompt, role=KVRole.PRODUCE))
    harness.run()
    assert harness.runner.num_computed_tokens == 2 * len(prompt)
    harness.engine.release_lease("a")
    harness.engine.add(request("other", prompt_of(32, 9), 8))  # needs all other blocks
    harness.run()
    names = block_hashes(NAMESPACE.root(), prompt, BLOCK_SIZE, include_partial=True)
    assert all(harness.engine.pool.find(name) is not None for name in names)
    harness.engine.release_lease("b")
    harness.engine.check_idle()


def test_a_lease_that_ends_early_keeps_nothing_and_silences_nothing() -> None:
    harness = Harness(publish=True, max_num_batched_tokens=16)
    harness.engine.add(request("a", prompt_of(50), role=KVRole.PRODUCE))
    harness.step()
    harness.engine.release_lease("a")
    harness.run()
    assert [count for result in harness.results for _, count in result.progress] == [2, 4, 6, 7]
    harness.engine.check_idle()


def test_deliver_and_start_after_an_abort_are_ignored() -> None:
    harness = Harness()
    harness.engine.add(request("a", prompt_of(30), role=KVRole.CONSUME))
    harness.step()
    reservation = harness.reservation("a")
    harness.engine.abort("a")
    assert harness.engine.pool.num_free < harness.engine.pool.num_blocks, "a transfer may still write to these blocks"
    harness.engine.deliver("a", 3)
    harness.engine.start("a", [TokenOutput(0, (5,))])
    harness.engine.add(request("a", prompt_of(20), 2))  # another one of that id
    harness.engine.deliver("a", 3)
    harness.engine.start("a", [TokenOutput(0, (5,))])
    harness.engine.unpin([block.block_id for block in reservation.missing])
    harness.run()
    assert harness.tokens == {("a", 0): expected_output(prompt_of(20), 2)}
    harness.engine.check_idle()


@pytest.mark.parametrize("length", [60, 64])
def test_a_prefill_engine_takes_what_others_hold(length: int) -> None:
    other, prefill = Harness(publish=True), Harness(publish=True)
    prompt = prompt_of(length)
    produce(other, "x", prompt)
    prefill.engine.add(replace(request("a", prompt, 8, role=KVRole.PRODUCE), receive=True))
    prefill.step()
    reservation = prefill.reservation("a")
    assert len(reservation.missing) == 7, "the last block is computed here for its logits"
    move(other, prefill, reservation)
    prefill.step()
    assert prefill.results[-1].progress == (("a", 7),), "who waits for these blocks need not wait for the last one"
    prefill.engine.start("a")
    prefill.run()
    assert prefill.runner.num_computed_tokens == length - 56
    assert [prompt.num_cached_tokens for result in prefill.results for prompt in result.prompts] == [0]
    assert list(prefill.tokens["a", 0]) == expected_output(prompt, 1)
    prefill.engine.release_lease("a")
    prefill.engine.check_idle()


def test_hits_are_offered_once_however_long_the_rest_of_the_prompt_is() -> None:
    harness = Harness(publish=True, publish_hits=True, max_num_batched_tokens=16)
    produce(harness, "first", prompt_of(40))
    harness.results.clear()
    produce(harness, "again", [*prompt_of(40), *prompt_of(60, 1)])
    assert sum(bool(result.progress) for result in harness.results) > 2
    names = [block.block_hash for result in harness.results for block in result.named]
    assert len(names) == len(set(names)) == 13
    for lease in ("first", "again"):
        harness.engine.release_lease(lease)
    harness.engine.check_idle()


@pytest.mark.parametrize("publish_hits", [False, True])
@pytest.mark.parametrize("length", [8, 16, 20, 60])
def test_hits_of_a_produced_prompt_are_offered_again_where_asked_for(length: int, publish_hits: bool) -> None:
    """They are offered with the progress that reports them or before, the tail too, but not for requests whose blocks
    nobody will fetch."""
    harness = Harness(publish=True, publish_hits=publish_hits, max_num_batched_tokens=16)
    prompt = prompt_of(length)
    produce(harness, "first", prompt)
    offered = [block for result in harness.results for block in result.named]
    assert len(offered) == -(-length // BLOCK_SIZE)
    harness.results.clear()
    produce(harness, "again", prompt)
    again = {block for result in harness.results for block in result.named}
    assert again == (set(offered) if publish_hits else set())
    for earlier in range(len(harness.results)):
        told = max((count for result in harness.results[: earlier + 1] for _, count in result.progress), default=0)
        assert sum(len(result.named) for result in harness.results[: earlier + 1]) >= told * publish_hits
    harness.results.clear()
    harness.engine.add(request("local", prompt))
    harness.run()
    assert not {block.block_hash for result in harness.results for block in result.named} & {
        block.block_hash for block in offered
    }
    for lease in ("first", "again"):
        harness.engine.release_lease(lease)
    harness.engine.check_idle()
