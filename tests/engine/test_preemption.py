"""A sequence that loses its blocks to others begins again, with the same tokens and before those that came later."""

from dataclasses import replace

from kvrelay.core.generation.outputs import FinishReason
from kvrelay.engine.request import KVRole
from tests.engine.fake_runner import expected_output
from tests.engine.harness import Harness, prompt_of, request


def test_preemption_recomputes_and_changes_nothing() -> None:
    harness = Harness(num_blocks=10)
    for i in range(4):
        harness.engine.add(request(str(i), prompt_of(9, i), 30))
    harness.run()
    assert harness.engine.load().num_preemptions > 0
    for i in range(4):
        assert harness.tokens[str(i), 0] == expected_output(prompt_of(9, i), 30)
    harness.engine.check_idle()


def test_what_a_request_has_computed_itself_is_not_cached_for_it_after_preemption() -> None:
    harness = Harness(num_blocks=10, max_num_batched_tokens=3)
    shared, others = prompt_of(8, seed=1), prompt_of(39, seed=2)
    harness.engine.add(request("before", [*shared, 1], max_tokens=1))
    harness.run()
    harness.engine.add(request("long", prompt_of(15), max_tokens=36))
    harness.engine.add(request("preempted", [*shared, *others], max_tokens=1))
    harness.run()
    assert harness.results[-1].load.num_preemptions == 1
    assert harness.cached_tokens("preempted") == len(shared)
    harness.engine.check_idle()


def test_a_preempted_request_counts_as_cached_only_what_it_finds_again() -> None:
    harness = Harness(num_blocks=10, max_num_batched_tokens=3, policy="priority")
    shared, others = prompt_of(8, seed=1), prompt_of(39, seed=2)
    harness.engine.add(request("before", [*shared, 1], max_tokens=1))
    harness.run()
    harness.engine.add(request("long", prompt_of(15), max_tokens=36))
    harness.engine.add(request("preempted", [*shared, *others], max_tokens=1))
    while harness.engine.load().num_preemptions == 0:
        assert harness.step()
    harness.engine.add(request("urgent", prompt_of(76, seed=3), max_tokens=1, priority=-1))
    harness.run()
    assert harness.finish_order == ["before", "long", "urgent", "preempted"]
    assert harness.cached_tokens("preempted") == 0, "the urgent one has taken all blocks"
    harness.engine.check_idle()


def test_a_preempted_sequence_gets_blocks_before_a_later_reservation() -> None:
    harness = Harness(num_blocks=8)
    for i in range(2):
        harness.engine.add(request(str(i), prompt_of(9, i), 40))
    while harness.engine.load().num_preemptions == 0:
        assert harness.step()
    assert harness.engine.load().num_free_blocks >= 2
    harness.engine.add(request("late", prompt_of(9, 2), role=KVRole.CONSUME))
    while ("0", 0) not in harness.finished:
        assert harness.step()
        assert not any(result.reservations for result in harness.results), "a preempted sequence waits for these blocks"
    harness.run()
    assert harness.tokens["1", 0] == expected_output(prompt_of(9, 1), 40)
    harness.engine.abort("late")
    harness.engine.unpin([block.block_id for block in harness.reservation("late").missing])
    harness.run()
    harness.engine.check_idle()


def test_an_output_of_which_no_more_is_needed_ends_though_it_is_preempted() -> None:
    harness = Harness(num_blocks=9)
    for i in range(3):
        harness.engine.add(request(str(i), prompt_of(11, i), 20, n=2))
    while harness.engine.load().num_preemptions == 0:
        harness.step()
    for i in range(3):
        harness.engine.finish(str(i), 1)
    harness.run()
    for i in range(3):
        expected = expected_output(prompt_of(11, i), 20, choice_index=1)
        assert harness.tokens[str(i), 0] == expected_output(prompt_of(11, i), 20)
        assert harness.tokens[str(i), 1] == expected[: len(harness.tokens[str(i), 1])]
    assert FinishReason.ABORT in harness.finished.values()
    harness.engine.check_idle()


def test_parallel_outputs_survive_preemption() -> None:
    harness = Harness(num_blocks=9)
    for i in range(3):
        harness.engine.add(request(str(i), prompt_of(11, i), 20, n=2))
    harness.run()
    assert harness.engine.load().num_preemptions > 0
    for i in range(3):
        for index in range(2):
            assert harness.tokens[str(i), index] == expected_output(prompt_of(11, i), 20, choice_index=index)
    harness.engine.check_idle()


def test_the_last_output_of_a_request_is_preempted_first_and_begins_again_last() -> None:
    harness = Harness(num_blocks=10, max_num_batched_tokens=16)
    harness.engine.add(request("before", prompt_of(9), 60))
    harness.step()
    harness.engine.add(request("outputs", prompt_of(20, 1), 30, n=2))
    while harness.engine.load().num_preemptions == 0:
        assert harness.step()
    num_tokens = [len(harness.tokens["outputs", index]) for index in range(2)]
    while harness.engine.load().num_preemptions == 1:
        assert harness.step()
    assert len(harness.tokens["outputs", 0]) > num_tokens[0]
    assert len(harness.tokens["outputs", 1]) == num_tokens[1]
    num_results = len(harness.results)
    harness.run()
    after = [item for result in harness.results[num_results:] for item in result.outputs]
    assert next(item.output.index for item in after if item.request_id == "outputs") == 0
    assert [len(harness.tokens["outputs", index]) for index in range(2)] == [30, 30]
    harness.engine.check_idle()


def test_prompt_logprobs_that_were_reported_are_not_computed_again_after_preemption() -> None:
    asking, plain = Harness(num_blocks=10), Harness(num_blocks=10)
    for i in range(4):
        item = request(str(i), prompt_of(9, i), 30, n=2)
        plain.engine.add(item)
        asking.engine.add(replace(item, sampling=replace(item.sampling, prompt_logprobs=1)))
    plain.run()
    asking.run()
    found = asking.engine.load().num_preemptions > 0, asking.runner.num_prompt_logprobs
    assert (*found, asking.runner.num_computed_tokens) == (True, 4 * 8, plain.runner.num_computed_tokens)
