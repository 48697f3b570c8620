"""How many tokens of prompts and decodes a step computes, and which."""

from dataclasses import dataclass, field, replace

import pytest

from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.request import KVRole
from kvrelay.engine.runner import LaunchedStep, Runner
from tests.engine.fake_runner import expected_output
from tests.engine.harness import Harness, prompt_of, request


def test_chunks_respect_the_token_budget_and_decodes_are_not_starved() -> None:
    harness = Harness(max_num_batched_tokens=16)
    harness.engine.add(request("long", prompt_of(100), 4))
    harness.step()
    harness.engine.add(request("short", prompt_of(5, 1), 12))
    harness.run()
    assert harness.runner.largest_step <= 16
    assert harness.tokens["short", 0] == expected_output(prompt_of(5, 1), 12)
    assert harness.tokens["long", 0] == expected_output(prompt_of(100), 4)
    harness.engine.check_idle()


@pytest.mark.parametrize(("num_decodes", "largest_mixed"), [(1, 20), (4, 20), (8, 24)])
def test_beside_decodes_a_prompt_gets_a_smaller_chunk(num_decodes: int, largest_mixed: int) -> None:
    """The prompt proceeds however many sequences decode. Once none does, its chunks are as large as a step may be."""
    harness = Harness(max_num_batched_tokens=48, max_num_mixed_tokens=20)
    for index in range(num_decodes):
        harness.engine.add(request(f"decode {index}", prompt_of(4, index), 6))
    harness.step()
    harness.engine.add(request("long", prompt_of(300), 1))
    sizes: dict[bool, list[int]] = {True: [], False: []}  # by whether somebody decodes
    while len(harness.finished) <= num_decodes:
        decoding = len(harness.finished) < num_decodes
        sizes[decoding].append(harness.count_step())
    assert sizes[True] == [largest_mixed] * 5
    assert set(sizes[False][:-1]) == {48}
    assert harness.tokens["long", 0] == expected_output(prompt_of(300), 1)
    harness.engine.check_idle()


@pytest.mark.parametrize(
    ("num_decodes", "length", "chunks"),
    [
        (2, 10, [10]),
        (2, 16, [16]),
        (2, 24, [16, 8]),
        (2, 80, [20, 20, 20, 20]),
        (2, 90, [23, 23, 23, 21]),
        (2, 170, [38, 38, 38, 38, 18]),
        (17, 40, [17, 17, 6]),
    ],
)
def test_beside_decodes_a_prompt_takes_four_steps_at_least_unless_it_is_short(
    num_decodes: int, length: int, chunks: list[int]
) -> None:
    """A prompt is short if it has few tokens, or not many more than there are decodes."""
    harness = Harness(max_num_seqs=20, max_num_batched_tokens=64, max_num_mixed_tokens=40)
    for index in range(num_decodes):
        harness.engine.add(request(f"decode {index}", prompt_of(3, index), 12))
    harness.step()
    harness.engine.add(request("prompt", prompt_of(length, 7), 2))
    sizes: list[int] = []
    while "prompt" not in {request_id for request_id, _ in harness.tokens}:
        sizes.append(harness.count_step() - num_decodes)
    assert sizes == chunks
    harness.run()
    assert harness.tokens["prompt", 0] == expected_output(prompt_of(length, 7), 2)
    harness.engine.check_idle()


@pytest.mark.parametrize(
    ("most", "limit", "size"),
    [
        (16, 8, 16),  # the smallest chunk makes no step larger than any may be
        (48, 48, 41),  # a prompt is not split if such steps may be as long as others
    ],
)
def test_beside_decodes_a_step_is_no_larger_than_any_may_be_and_splits_no_prompt_needlessly(
    most: int, limit: int, size: int
) -> None:
    harness = Harness(max_num_batched_tokens=most, max_num_mixed_tokens=limit)
    harness.engine.add(request("decode", prompt_of(4), 6))
    harness.step()
    harness.engine.add(request("prompt", prompt_of(40, 1), 1))
    assert harness.count_step() == size


def test_a_decode_does_not_wait_for_a_prompt_before_it() -> None:
    """Its KV has come from elsewhere while the prompt is computed chunk by chunk."""
    harness = Harness(max_num_batched_tokens=16)
    harness.engine.add(request("prompt", prompt_of(100), 1))
    harness.engine.add(request("decode", [7], 4, role=KVRole.CONSUME))
    harness.step()
    [block] = harness.reservation("decode").missing
    harness.runner.pool[block.block_id][0] = 7
    harness.engine.deliver("decode", 1)
    harness.engine.unpin([block.block_id])
    harness.engine.start("decode", [TokenOutput(0, (5,))])
    harness.run()
    assert harness.finish_order == ["decode", "prompt"]
    assert harness.runner.largest_step == 16
    harness.engine.check_idle()


def test_beside_decodes_chunks_do_not_grow_with_the_number_of_prompts_that_wait() -> None:
    harness = Harness(max_num_batched_tokens=64, max_num_mixed_tokens=40)
    harness.engine.add(request("decode", prompt_of(3), 30))
    harness.step()
    prompts = {f"prompt {index}": prompt_of(80, index + 1) for index in range(3)}
    for request_id, prompt in prompts.items():
        harness.engine.add(request(request_id, prompt, 1))
    sizes: list[int] = []
    while len(harness.finished) < len(prompts):
        sizes.append(harness.count_step() - 1)
    assert sizes == [20] * 12
    assert list(harness.finished)[:3] == [(request_id, 0) for request_id in prompts]
    harness.run()
    for request_id, prompt in prompts.items():
        assert harness.tokens[request_id, 0] == expected_output(prompt, 1)
    harness.engine.check_idle()


def test_more_decodes_than_a_step_may_compute_take_the_oldest_first() -> None:
    harness = Harness(max_num_seqs=8, max_num_batched_tokens=4)
    ids = [str(i) for i in range(8)]
    for i, request_id in enumerate(ids):
        harness.engine.add(request(request_id, [i], 4, role=KVRole.CONSUME))
    harness.step()
    for i, request_id in enumerate(ids):
        [block] = harness.reservation(request_id).missing
        harness.runner.pool[block.block_id][0] = i
        harness.engine.deliver(request_id, 1)
        harness.engine.unpin([block.block_id])
        harness.engine.start(request_id, [TokenOutput(0, (5,))])
    harness.run()
    assert harness.finish_order == ids
    assert harness.runner.largest_step <= 4


def test_all_outputs_of_a_request_go_before_those_of_a_later_one() -> None:
    harness = Harness(max_num_batched_tokens=2)
    harness.engine.add(request("first", [1], 4, n=2))
    harness.engine.add(request("second", [2], 4))
    harness.run()
    assert harness.finish_order == ["first", "first", "second"]
    harness.engine.check_idle()


@dataclass
class Recorder:
    """A runner that keeps how many tokens of each sequence a step computes, by the sequence's first token there."""

    runner: Runner
    steps: list[dict[int, int]] = field(default_factory=list)

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        self.steps.append({entry.token_ids[0]: len(entry.token_ids) for entry in plan.scheduled})
        return self.runner.launch(plan)


@pytest.mark.parametrize(
    ("lengths", "priorities", "shares"),
    [
        ((200, 20), (0, 0), [(64, 0), (44, 20), (64, 0), (28, 0)]),  # as many as it needs
        ((300, 50), (0, 0), [(64, 0), (32, 32), (46, 18), (64, 0), (64, 0), (30, 0)]),  # a half at most
        ((200, 60), (0, 0), [(64, 0), (64, 0), (64, 0), (8, 56), (0, 4)]),  # not much shorter
        ((200, 20), (0, 1), [(64, 0), (64, 0), (64, 0), (8, 20)]),  # less urgent
        ((200, 20, 20), (0, 0, 0), [(64, 0, 0), (44, 20, 0), (44, 0, 20), (48, 0, 0)]),
    ],
)
def test_a_prompt_leaves_a_share_of_each_step_to_a_much_shorter_one_that_comes_next(
    lengths: tuple[int, ...], priorities: tuple[int, ...], shares: list[tuple[int, ...]]
) -> None:
    recorders: list[Recorder] = []

    def recorded(runner: Runner) -> Runner:
        recorders.append(Recorder(runner))
        return recorders[0]

    harness = Harness(num_blocks=128, max_num_batched_tokens=64, policy="priority", wrap=recorded)
    for number, (length, priority) in enumerate(zip(lengths, priorities, strict=True)):
        harness.engine.add(request(str(number), [number] * length, 1, priority=priority))
    harness.run()
    assert [tuple(step.get(number, 0) for number in range(len(lengths))) for step in recorders[0].steps] == shares
    for number, length in enumerate(lengths):
        assert harness.tokens[str(number), 0] == expected_output([number] * length, 1)
    harness.engine.check_idle()


def test_a_share_is_kept_only_once_for_a_prompt_that_lacks_a_place() -> None:
    harness = Harness(max_num_seqs=1, max_num_batched_tokens=32)
    harness.engine.add(request("long", prompt_of(184), 1))
    harness.engine.add(request("short", prompt_of(20, 1), 4))
    assert [harness.count_step() for _ in range(7)] == [32, 16, 32, 32, 32, 32, 8]
    harness.run()
    assert harness.tokens["short", 0] == expected_output(prompt_of(20, 1), 4)
    harness.engine.check_idle()


def test_a_prompt_that_lacked_a_place_gets_its_share_once_there_is_one() -> None:
    harness = Harness(num_blocks=128, max_num_seqs=2, max_num_batched_tokens=64)
    harness.engine.add(request("decoding", prompt_of(8, 2), 3))
    harness.step()
    harness.engine.add(request("long", prompt_of(600), 1))
    harness.step()
    harness.engine.add(request("short", prompt_of(20, 1), 1))
    harness.step()
    assert ("decoding", 0) in harness.finished
    harness.step()
    assert ("short", 0) in harness.finished and ("long", 0) not in harness.finished
    harness.run()
    assert harness.tokens["short", 0] == expected_output(prompt_of(20, 1), 1)
    harness.engine.check_idle()


def test_a_prompt_that_lacked_blocks_to_receive_gets_its_share_of_steps() -> None:
    harness = Harness(num_blocks=82, max_num_batched_tokens=64)
    harness.engine.add(request("decoding", prompt_of(32, 2), 3))
    harness.step()
    harness.engine.add(request("long", prompt_of(600), 1))
    harness.step()
    harness.engine.add(replace(request("short", prompt_of(24, 1), 1), receive=True))
    harness.step()
    assert ("decoding", 0) in harness.finished and harness.engine.load().num_requests_waiting == 1
    harness.step()
    reservation = harness.reservation("short")
    harness.engine.start("short")
    harness.engine.unpin([block.block_id for block in reservation.missing])
    harness.step()
    assert ("short", 0) in harness.finished and ("long", 0) not in harness.finished
    harness.run()
    assert harness.tokens["short", 0] == expected_output(prompt_of(24, 1), 1)
    harness.engine.check_idle()


def test_no_share_is_kept_for_a_prompt_behind_one_that_lacks_blocks_to_receive() -> None:
    """It does not begin before that one, so the tokens would be nobody's."""
    harness = Harness(num_blocks=90, max_num_batched_tokens=64)
    harness.engine.add(request("long", prompt_of(600), 1))
    harness.step()
    harness.engine.add(replace(request("lacking", prompt_of(200, 1), 1), receive=True))
    harness.step()
    harness.engine.add(request("short", prompt_of(20, 2), 1))
    assert [harness.count_step() for _ in range(5)] == [64] * 5
    harness.engine.abort("lacking")
    assert [harness.count_step() for _ in range(2)] == [64, 64]
    assert ("short", 0) in harness.finished and ("long", 0) not in harness.finished
    harness.run()
    harness.engine.check_idle()
