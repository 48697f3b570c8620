"""The engine with a runner whose KV is the tokens: scheduling, sharing, preemption, leases, and nothing left behind."""

import random
from dataclasses import replace

import pytest

from kvrelay.core.errors import InvalidRequestError, KVRelayError
from kvrelay.core.generation.outputs import FinishReason
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.engine import Engine
from kvrelay.engine.plan import ModelRunnerOutput, SchedulerOutput
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.runner import LaunchedStep
from kvrelay.engine.sampling.sampler import NO_TOKEN
from tests.engine.fake_runner import FakeRunner, expected_output
from tests.engine.finished_step import FinishedStep
from tests.engine.harness import BLOCK_SIZE, NAMESPACE, Harness, prompt_of, request


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 63, 64, 65, 200])
def test_tokens_are_right_for_every_prompt_length(length: int) -> None:
    harness = Harness()
    harness.engine.add(request("a", prompt_of(length)))
    harness.run()
    assert harness.tokens["a", 0] == expected_output(prompt_of(length), 8)
    assert harness.finished["a", 0] is FinishReason.LENGTH
    harness.engine.check_idle()


def test_a_second_request_computes_only_its_suffix() -> None:
    harness = Harness()
    shared = prompt_of(40)
    harness.engine.add(request("a", [*shared, 1, 2]))
    harness.run()
    before = harness.runner.num_computed_tokens
    harness.engine.add(request("b", [*shared, 3, 4, 5], 1))
    harness.run()
    assert harness.cached_tokens("b") == 40
    assert harness.runner.num_computed_tokens - before == 3
    assert harness.tokens["b", 0] == expected_output([*shared, 3, 4, 5], 1)
    harness.engine.check_idle()


def test_generated_blocks_serve_the_next_turn() -> None:
    harness = Harness()
    prompt = prompt_of(8)
    harness.engine.add(request("a", prompt, 17))
    harness.run()
    next_turn = [*prompt, *harness.tokens["a", 0], 7, 7]
    harness.engine.add(request("b", next_turn, 1))
    harness.run()
    assert harness.cached_tokens("b") == 24  # 8 prompt tokens and 16 of the 17 generated ones: the last has no KV
    assert harness.tokens["b", 0] == expected_output(next_turn, 1)


def test_salted_prompts_share_nothing() -> None:
    harness = Harness()
    harness.engine.add(request("a", prompt_of(32)))
    harness.run()
    harness.engine.add(replace(request("b", prompt_of(32)), cache_salt=b"tenant"))
    harness.run()
    assert harness.cached_tokens("b") == 0
    harness.engine.check_idle()


def test_parallel_outputs_share_the_prompt_and_copy_on_write() -> None:
    harness = Harness()
    prompt = prompt_of(20)
    harness.engine.add(request("a", prompt, 10, n=3))
    most_used = 0
    while harness.step():
        most_used = max(most_used, harness.engine.pool.num_blocks - harness.engine.pool.num_free)
    assert harness.runner.num_computed_tokens == 20 + 3 * 9
    assert most_used == 2 + 3 * 2, "the two full blocks are there once"
    for index in range(3):
        assert harness.tokens["a", index] == expected_output(prompt, 10, choice_index=index)
    harness.engine.check_idle()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_output_of_which_no_more_is_needed_ends_and_the_others_go_on(run_ahead: bool) -> None:
    harness = Harness(run_ahead=run_ahead)
    prompt = prompt_of(20)
    harness.engine.add(request("a", prompt, 10, n=3))
    harness.engine.finish("a", 0)  # it stands for all of them until the first tokens are there
    harness.step()
    assert not harness.finished
    while len(harness.tokens["a", 1]) < 3:
        harness.engine.finish("a", 3)
        harness.step()
    for _ in range(2):
        harness.engine.finish("a", 1)
    num_computed = harness.runner.num_computed_tokens
    harness.run()
    harness.engine.finish("a", 2)
    assert harness.finished == {
        ("a", 0): FinishReason.LENGTH,
        ("a", 1): FinishReason.ABORT,
        ("a", 2): FinishReason.LENGTH,
    }
    assert harness.finish_order == 3 * ["a"], "each ends once"
    for index, length in enumerate((10, 3, 10)):
        assert harness.tokens["a", index] == expected_output(prompt, 10, choice_index=index)[:length]
    under_way = int(run_ahead)  # of the output that has ended
    assert harness.runner.num_computed_tokens - num_computed == 2 * 7 + under_way
    harness.engine.check_idle()


@pytest.mark.parametrize("role", [KVRole.LOCAL, KVRole.CONSUME])
def test_no_more_sequences_run_than_may(role: KVRole) -> None:
    """Outputs that are still to branch count, and so do requests whose KV arrives. As many as may do run."""
    harness = Harness(max_num_seqs=4)
    for number, max_tokens in enumerate((6, 2, 6)):
        harness.engine.add(request(str(number), [number], max_tokens, n=2, role=role if number == 0 else KVRole.LOCAL))
    most = 0
    while harness.step():
        most = max(most, harness.engine.load().num_requests_running)
    if role is KVRole.LOCAL:
        assert most == 4
        assert harness.finish_order == ["1", "1", "0", "0", "2", "2"]
        assert harness.engine.load().num_steps == 8, "the third one began when the second had ended"
        return
    assert most == 3, "the first one waits for its KV, in one sequence"
    assert harness.finish_order == ["1", "1", "2", "2"]
    harness.engine.abort("0")
    harness.engine.unpin([block.block_id for block in harness.reservation("0").missing])
    harness.engine.check_idle()


def test_no_output_becomes_longer_than_a_sequence_may_be() -> None:
    harness = Harness(num_blocks=4)
    harness.engine.add(request("a", prompt_of(10), 100, n=2))
    harness.run()
    for index in range(2):
        assert harness.tokens["a", index] == expected_output(prompt_of(10), 22, choice_index=index)
    assert set(harness.finished.values()) == {FinishReason.LENGTH}
    harness.engine.check_idle()


def test_priority_runs_lower_values_first_and_fcfs_ignores_it() -> None:
    orders = {}
    for policy in ("fcfs", "priority"):
        harness = Harness(max_num_seqs=1, policy=policy)
        for request_id, priority in (("a", 5), ("b", 0), ("c", -5)):
            harness.engine.add(request(request_id, prompt_of(10), 2, priority=priority))
        harness.run()
        orders[policy] = harness.finish_order
    assert orders == {"fcfs": ["a", "b", "c"], "priority": ["c", "b", "a"]}


def test_every_output_has_its_requests_priority() -> None:
    harness = Harness(max_num_batched_tokens=1, policy="priority")
    harness.engine.add(request("a", prompt_of(10), 4, priority=5, n=2))
    harness.run()
    assert list(harness.finished) == [("a", 0), ("a", 1)]


def test_stop_tokens_end_a_sequence_unless_ignored() -> None:
    prompt = prompt_of(10)
    eos = expected_output(prompt, 3)[2]
    harness = Harness(eos=[eos])
    harness.engine.add(request("a", prompt, 8))
    ignoring = request("b", prompt, 8)
    harness.engine.add(replace(ignoring, sampling=replace(ignoring.sampling, ignore_eos=True)))
    stopping = replace(ignoring.sampling, ignore_eos=True, stop_token_ids=(expected_output(prompt, 5)[4],))
    harness.engine.add(replace(request("c", prompt, 8), sampling=stopping))
    harness.run()
    assert harness.tokens["a", 0] == expected_output(prompt, 3)
    assert harness.finished["a", 0] is FinishReason.STOP
    assert harness.tokens["b", 0] == expected_output(prompt, 8)
    assert harness.tokens["c", 0] == expected_output(prompt, 5)
    stops = {item.request_id: item.output.stop_token_id for result in harness.results for item in result.outputs}
    assert stops == {"a": eos, "b": None, "c": expected_output(prompt, 5)[4]}


def test_prompt_logprobs_cover_the_whole_prompt_despite_cache_and_chunks() -> None:
    harness = Harness(max_num_batched_tokens=16)
    prompt = prompt_of(40)
    harness.engine.add(request("a", prompt))
    harness.run()
    asked = request("b", prompt, 2)
    harness.engine.add(replace(asked, sampling=replace(asked.sampling, prompt_logprobs=1)))
    harness.run()
    found = next(p.prompt_logprobs for r in harness.results for p in r.prompts if p.request_id == "b")
    assert [entry.token_id for entry in found] == prompt[1:]
    harness.engine.check_idle()


def test_aborts_in_every_state_leave_nothing() -> None:
    harness = Harness(num_blocks=12, publish=True)
    harness.engine.add(request("receiving", prompt_of(30), role=KVRole.CONSUME))
    harness.engine.add(request("running", prompt_of(20, 1), 50))
    harness.step()
    harness.engine.add(request("reserving", prompt_of(80, 2), role=KVRole.CONSUME))
    harness.engine.add(request("waiting", prompt_of(90, 3)))
    harness.engine.add(request("producing", prompt_of(20, 4), role=KVRole.PRODUCE))
    harness.step()
    missing = [block.block_id for block in harness.reservation("receiving").missing]
    for request_id in ("receiving", "running", "reserving", "waiting", "producing", "unknown", "running"):
        harness.engine.abort(request_id)
    harness.engine.unpin(missing)
    harness.run()
    harness.engine.check_idle()


def test_prefill_is_measured_and_decoding_is_not() -> None:
    harness = Harness(max_num_batched_tokens=16)
    harness.engine.add(request("a", prompt_of(50), 20))
    harness.run()
    load = harness.engine.load()
    assert load.num_prefilled_tokens == 50 and load.prefill_seconds > 0


@pytest.mark.parametrize(
    ("bad", "field"),
    [(request("x", []), "prompt"), (request("x", [1] * 512), "prompt"), (request("x", [1], n=17), "n")],
)
def test_a_request_that_can_never_run_is_refused(bad: EngineRequest, field: str) -> None:
    harness = Harness()
    with pytest.raises(InvalidRequestError) as error:
        harness.engine.add(bad)
    assert error.value.field == field
    harness.engine.check_idle()


@pytest.mark.parametrize("role", [KVRole.LOCAL, KVRole.PRODUCE])
def test_a_request_of_the_same_id_is_refused_until_the_first_one_and_its_lease_are_over(role: KVRole) -> None:
    harness = Harness(publish=True)
    for _ in range(2):
        harness.engine.add(request("a", prompt_of(20), 2, role=role))
        for _ in range(1 + (role is KVRole.PRODUCE)):
            with pytest.raises(InvalidRequestError, match="running already"):
                harness.engine.add(request("a", prompt_of(20), 2, role=role))
            harness.run()
        harness.engine.release_lease("a")
    harness.engine.check_idle()


class NotFiniteRunner(FakeRunner):
    """A runner that has no token for rows of sequences that begin with token 999."""

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        output = super().launch(plan).collect()
        results = tuple(
            replace(result, sampled=tuple(replace(token, token_id=NO_TOKEN) for token in result.sampled))
            if 999 in entry.token_ids
            else result
            for entry, result in zip(plan.scheduled, output.results, strict=True)
        )
        return FinishedStep(ModelRunnerOutput(results))


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_request_whose_logits_are_not_finite_fails_alone(run_ahead: bool) -> None:
    harness = Harness(run_ahead=run_ahead, wrap=lambda runner: NotFiniteRunner(64, BLOCK_SIZE))
    harness.engine.add(request("good", [1, 2, 3]))
    harness.step()
    harness.engine.add(request("bad", [999, 1, 2], n=2))
    harness.engine.add(request("other", [4, 5]))
    harness.run()
    failures = [failure for result in harness.results for failure in result.failures]
    assert [(failure.request_id, "not finite" in failure.message) for failure in failures] == [("bad", True)]
    assert harness.tokens["good", 0] == expected_output([1, 2, 3], 8)
    assert harness.tokens["other", 0] == expected_output([4, 5], 8)
    harness.engine.check_idle()


class FailingRunner(FakeRunner):
    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        if any(999 in entry.token_ids for entry in plan.scheduled):
            raise KVRelayError("the logits are not finite")
        return super().launch(plan)


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on() -> None:
    harness = Harness()
    runner = FailingRunner(64, BLOCK_SIZE)
    config = harness.engine.config
    pool = BlockPool(64, retract=lambda block_ids: None)
    harness.engine = Engine(config, runner, pool, NAMESPACE, eos_token_ids=(), publish=False)
    harness.engine.add(request("bad", [999, 1, 2]))
    harness.run()
    failures = [failure for result in harness.results for failure in result.failures]
    assert [(failure.request_id, failure.message) for failure in failures] == [("bad", "the logits are not finite")]
    harness.engine.add(request("good", [1, 2, 3]))
    harness.run()
    assert harness.tokens["good", 0] == expected_output([1, 2, 3], 8)
    harness.engine.check_idle()


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_on_a_small_pool_has_the_right_tokens_and_leaves_nothing(seed: int) -> None:
    """Arrivals, aborts, shared prefixes, siblings and preemptions come in any order."""
    rng = random.Random(seed)
    harness = Harness(num_blocks=rng.choice([12, 20, 40]), max_num_batched_tokens=rng.choice([16, 40]), max_num_seqs=6)
    prefix = prompt_of(24, seed)
    sent: dict[str, EngineRequest] = {}
    aborted: set[str] = set()
    for i in range(30):
        prompt = [*prefix[: rng.randrange(24)], *prompt_of(rng.randrange(1, 30), i)]
        sent[str(i)] = request(str(i), prompt, rng.randrange(1, 12), n=rng.choice([1, 1, 2]), priority=rng.randrange(3))
        harness.engine.add(sent[str(i)])
        for _ in range(rng.randrange(4)):
            harness.step()
        if rng.random() < 0.2:
            victim = str(rng.randrange(i + 1))
            harness.engine.abort(victim)
            aborted.add(victim)
        harness.engine.pool.check_integrity()
    harness.run()
    for request_id, item in sent.items():
        for index in range(item.sampling.n):
            expected = expected_output(item.prompt_token_ids, item.sampling.max_tokens, choice_index=index)
            got = harness.tokens[request_id, index]
            assert got == expected if request_id not in aborted else got == expected[: len(got)]
    harness.engine.check_idle()
