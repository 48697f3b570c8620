"""A request that began on another engine continues with the tokens it would have had, and its tokens so far count."""

from dataclasses import replace

import pytest

from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.runner import LaunchedStep
from kvrelay.engine.sampling.sampler import SamplingRow
from tests.engine.fake_runner import FakeRunner, expected_output
from tests.engine.harness import BLOCK_SIZE, Harness, first_tokens, move, prompt_of, request

PROMPT = prompt_of(13)
MAX_TOKENS = 30


def resumed(request_id: str, num_prior: int, *, choice: int = 0, role: KVRole = KVRole.LOCAL) -> EngineRequest:
    """Returns a request that continues after the first tokens of output `choice`."""
    prior = tuple(expected_output(PROMPT, num_prior, choice_index=choice))
    asked = request(request_id, PROMPT, MAX_TOKENS, role=role)
    return replace(asked, prior_output_token_ids=prior, first_choice_index=choice)


@pytest.mark.parametrize("choice", [0, 3])
@pytest.mark.parametrize("num_prior", [0, 1, 2, 3, 4, 10, 11, 12, 29])
def test_a_resumed_output_is_the_rest_of_the_whole_one(num_prior: int, choice: int) -> None:
    """The given tokens end in, at, and one after a block, or only the last output token is left."""
    harness = Harness()
    harness.engine.add(resumed("a", num_prior, choice=choice))
    harness.run()
    assert harness.tokens["a", choice] == expected_output(PROMPT, MAX_TOKENS, choice_index=choice)[num_prior:]
    assert harness.finished == {("a", choice): FinishReason.LENGTH}
    assert harness.runner.num_computed_tokens == len(PROMPT) + MAX_TOKENS - 1
    harness.engine.check_idle()


@pytest.mark.parametrize("num_prior", [1, 2, 3, 4, 11])
def test_a_resumed_output_split_over_two_engines_recomputes_no_token(num_prior: int) -> None:
    prefill, decode = Harness(publish=True), Harness(publish=True)
    decode.engine.add(resumed("a", num_prior, choice=2, role=KVRole.CONSUME))
    decode.step()
    prefill.engine.add(resumed("a", num_prior, choice=2, role=KVRole.PRODUCE))
    prefill.run()
    move(prefill, decode, decode.reservation("a"))
    first = first_tokens(prefill, "a")
    decode.engine.start("a", first)
    decode.run()
    found = [*first[0].token_ids, *decode.tokens["a", 2]]
    assert found == expected_output(PROMPT, MAX_TOKENS, choice_index=2)[num_prior:]
    num_computed = prefill.runner.num_computed_tokens + decode.runner.num_computed_tokens
    assert num_computed == len(PROMPT) + MAX_TOKENS - 1
    prefill.engine.release_lease("a")
    for harness in (prefill, decode):
        harness.engine.check_idle()


def test_what_the_first_engine_computed_is_found_by_name() -> None:
    """So are blocks with generated tokens."""
    harness = Harness()
    harness.engine.add(request("a", PROMPT, 12))
    harness.run()
    harness.engine.add(resumed("b", 12))
    harness.run()
    assert harness.cached_tokens("b") == (len(PROMPT) + 11) // BLOCK_SIZE * BLOCK_SIZE == 24
    assert harness.tokens["b", 0] == expected_output(PROMPT, MAX_TOKENS)[12:]


def test_preemption_of_a_resumed_output_changes_nothing() -> None:
    harness = Harness(num_blocks=15)
    for number in range(4):
        harness.engine.add(resumed(str(number), 5 * number, choice=number))
    harness.run()
    assert harness.engine.load().num_preemptions > 0
    for number in range(4):
        expected = expected_output(PROMPT, MAX_TOKENS, choice_index=number)
        assert harness.tokens[str(number), number] == expected[5 * number :]
    harness.engine.check_idle()


def test_outputs_without_tokens_may_begin_at_any_index() -> None:
    harness = Harness()
    harness.engine.add(replace(request("a", PROMPT, 6, n=2), first_choice_index=3))
    harness.run()
    assert set(harness.tokens) == {("a", 3), ("a", 4)}
    for index in (3, 4):
        assert harness.tokens["a", index] == expected_output(PROMPT, 6, choice_index=index)


class RecordingRunner(FakeRunner):
    """A runner that records what it was asked to sample."""

    def __init__(self) -> None:
        super().__init__(64, BLOCK_SIZE)
        self.rows: list[tuple[int, int, int, dict[int, int]]] = []

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        self.rows.extend(_values(row) for entry in plan.scheduled for row in entry.rows)
        return super().launch(plan)


def _values(row: SamplingRow) -> tuple[int, int, int, dict[int, int]]:
    assert row.seen is not None
    seen = dict(zip(row.seen.token_ids.tolist(), row.seen.output_counts.tolist(), strict=True))
    return row.choice_index, row.position, row.num_output_tokens, seen


def test_the_sampler_sees_what_it_would_have_seen() -> None:
    """Position, number of output tokens, and which tokens are output decide what seeds, penalties and limits do."""
    seen = []
    for num_prior in (0, 7):
        harness = Harness()
        runner = harness.engine._runner = RecordingRunner()
        asked = resumed("a", num_prior)
        harness.engine.add(replace(asked, sampling=replace(asked.sampling, repetition_penalty=1.5)))
        harness.run()
        seen.append(runner.rows)
    assert seen[1] == seen[0][7:]


def test_bounds_and_end_tokens_hold_for_the_whole_output() -> None:
    whole = expected_output(PROMPT, MAX_TOKENS)
    harness = Harness(eos=[whole[9]])
    asked = resumed("a", 5)
    harness.engine.add(replace(asked, sampling=replace(asked.sampling, ignore_eos=False)))
    harness.run()
    assert harness.tokens["a", 0] == whole[5:10]
    assert harness.finished["a", 0] is FinishReason.STOP


def test_prompt_logprobs_are_of_the_prompt_alone() -> None:
    harness = Harness(max_num_batched_tokens=5)  # so that a chunk has tokens of both
    asked = resumed("a", 5)
    harness.engine.add(replace(asked, sampling=replace(asked.sampling, prompt_logprobs=0)))
    harness.run()
    [prompt] = [found for result in harness.results for found in result.prompts]
    assert [entry.token_id for entry in prompt.prompt_logprobs] == PROMPT[1:]


def test_a_first_token_that_ends_the_output_is_the_last_one() -> None:
    harness = Harness()
    harness.engine.add(resumed("a", MAX_TOKENS - 1, role=KVRole.PRODUCE))
    harness.run()
    last = expected_output(PROMPT, MAX_TOKENS)[-1]
    assert first_tokens(harness, "a") == [TokenOutput(0, (last,), finish_reason=FinishReason.LENGTH)]
    harness.engine.release_lease("a")
    harness.engine.check_idle()
