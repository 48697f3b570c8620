"""How many tokens of prompts and decodes a step computes, and which."""

import pytest

from kvrelay.core.outputs import TokenOutput
from kvrelay.engine.request import KVRole
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
    [block] = harness.admission("decode").missing
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
        [block] = harness.admission(request_id).missing
        harness.runner.pool[block.block_id][0] = i
        harness.engine.deliver(request_id, 1)
        harness.engine.unpin([block.block_id])
        harness.engine.start(request_id, [TokenOutput(0, (5,))])
    harness.run()
    assert harness.finish_order == ids
    assert harness.runner.largest_step <= 4
