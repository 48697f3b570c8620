"""Planning a step while the one before it is in flight changes no token, and no block is reused too early."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from paged_kernels.registry import select_backend

from kvrelay.core.errors import KVRelayError
from kvrelay.core.generation.outputs import FinishReason
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.cpu.runner import CpuRunner
from kvrelay.engine.engine import Engine
from kvrelay.engine.in_flight import StepsInFlight
from kvrelay.engine.loading.loader import LoadedModel, load_model
from kvrelay.engine.plan import UNKNOWN_TOKEN, ModelRunnerOutput, SchedulerOutput
from kvrelay.engine.request import EngineRequest
from kvrelay.engine.runner import LaunchedStep, Runner
from kvrelay.engine.sampling.sampler import Sampler
from kvrelay.engine.scheduler import SchedulerConfig
from tests.engine.fake_runner import expected_output
from tests.engine.harness import BLOCK_SIZE, NAMESPACE, Harness, prompt_of, request
from tests.engine.late_runner import LateRunner
from tests.engine.tiny_models import make_tiny_model

EOS = tuple(range(0, 1000, 23))


class RecordingRunner:
    """A runner that records the plans for `inner`."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.plans: list[SchedulerOutput] = []

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        self.plans.append(plan)
        return self.inner.launch(plan)


def recorded(*, eos: Sequence[int] = ()) -> tuple[Harness, list[SchedulerOutput]]:
    recorder: list[RecordingRunner] = []

    def wrap(runner: Runner) -> Runner:
        recorder.append(RecordingRunner(runner))
        return recorder[0]

    harness = Harness(eos=eos, run_ahead=True, wrap=wrap)
    return harness, recorder[0].plans


# -- one request, step by step ---------------------------------------------------------------------------------------


def test_a_decode_goes_on_from_a_row_of_the_step_in_flight() -> None:
    harness, plans = recorded()
    for name in ("a", "b"):
        harness.engine.add(request(name, prompt_of(5, ord(name)), 4))
    harness.step()
    assert not harness.tokens, "the first step is not collected before the second is launched"
    harness.step()
    assert {key: len(tokens) for key, tokens in harness.tokens.items()} == {("a", 0): 1, ("b", 0): 1}
    assert [(entry.token_ids, entry.start, entry.input_row) for entry in plans[1].scheduled] == [
        ((UNKNOWN_TOKEN,), 5, 0),
        ((UNKNOWN_TOKEN,), 5, 1),
    ]
    harness.run()
    for name in ("a", "b"):
        assert harness.tokens[name, 0] == expected_output(prompt_of(5, ord(name)), 4)
    assert len(plans) == 4, "nothing is launched behind an end that is known before"
    harness.engine.check_idle()


def test_the_extra_token_of_an_ended_output_is_thrown_away() -> None:
    prompt = prompt_of(5)
    whole = expected_output(prompt, 3)
    harness, plans = recorded(eos=[whole[-1]])
    harness.engine.add(request("a", prompt, 8))
    while not harness.finished:
        assert harness.step()
    assert len(harness.late.in_flight) == 1
    assert harness.step(), "a step in flight is something to do"
    assert not harness.late.in_flight
    assert not harness.step()
    assert harness.tokens["a", 0] == whole
    assert len(plans) == 4
    assert harness.results[-1].load.num_free_blocks == 64, "the last report says that its block is free"
    harness.engine.check_idle()


def test_blocks_of_an_aborted_request_wait_for_the_step_in_flight() -> None:
    harness = Harness(run_ahead=True)
    harness.engine.add(request("a", prompt_of(20), 8))
    harness.step()
    harness.step()
    harness.engine.abort("a")
    assert harness.engine.load().num_free_blocks == 61
    harness.step()
    assert harness.engine.load().num_free_blocks == 64
    assert len(harness.tokens["a", 0]) == 1
    harness.engine.check_idle()


def test_a_block_is_named_when_its_step_is_collected() -> None:
    harness = Harness(run_ahead=True)
    harness.engine.add(request("a", prompt_of(8), 8))
    harness.step()
    assert not harness.results or not harness.results[-1].stored
    harness.step()
    assert len(harness.results[-1].stored) == 1
    harness.run()
    harness.engine.check_idle()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=8, temperature=0.0, seed=0, repetition_penalty=1.5),
        SamplingParams(max_tokens=8, temperature=0.0, seed=0, presence_penalty=1.5),
        SamplingParams(max_tokens=8, temperature=0.0, seed=0, frequency_penalty=1.5),
    ],
)
def test_sampling_that_reads_the_output_waits_for_it(sampling: SamplingParams) -> None:
    harness = Harness(run_ahead=True, max_num_batched_tokens=16)
    prompt = prompt_of(40)
    harness.engine.add(replace(request("a", prompt), sampling=sampling))
    harness.run()
    assert harness.late.num_ahead == 2, "only chunks of its prompt"
    assert harness.tokens["a", 0] == expected_output(prompt, 8)


def test_who_asks_whether_the_engine_is_idle_waits_for_the_step_in_flight() -> None:
    harness = Harness(run_ahead=True)
    harness.engine.add(request("a", prompt_of(5), 8))
    harness.step()
    harness.engine.abort("a")
    assert harness.late.in_flight
    harness.engine.check_idle()
    assert not harness.late.in_flight


def test_parallel_outputs_branch_when_their_first_tokens_are_known() -> None:
    harness = Harness(run_ahead=True)
    other = prompt_of(9, 1)
    harness.engine.add(request("other", other, 12))
    harness.engine.add(request("a", prompt_of(20), 6, n=3))
    harness.run()
    assert harness.tokens["other", 0] == expected_output(other, 12)
    for index in range(3):
        assert harness.tokens["a", index] == expected_output(prompt_of(20), 6, choice_index=index)
    assert harness.runner.num_computed_tokens == 20 + 3 * 5 + 9 + 11
    harness.engine.check_idle()


# -- any workload ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, the number of steps after it, and the requests that are then aborted."""

    request: EngineRequest
    num_steps: int
    aborts: str | None


def draw_sampling(rng: random.Random, prompt: Sequence[int]) -> SamplingParams:
    n = rng.choice([1, 1, 1, 2, 3])
    stop = [rng.choice(expected_output(prompt, 8, choice_index=rng.randrange(n)))] if rng.random() < 0.3 else []
    return SamplingParams(
        n=n,
        max_tokens=rng.randrange(1, 80 - len(prompt)),
        temperature=0.0,
        seed=0,
        stop_token_ids=tuple(stop),
        ignore_eos=rng.random() < 0.5,
        presence_penalty=rng.choice([0.0] * 9 + [0.5]),
        prompt_logprobs=rng.choice([None] * 9 + [1]),
        repetition_penalty=rng.choice([1.0] * 9 + [1.5]),
    )


def draw_arrivals(rng: random.Random) -> list[Arrival]:
    prefix = prompt_of(24, rng.randrange(1000))
    arrivals = []
    for i in range(16):
        prompt = [*prefix[: rng.randrange(24)], *prompt_of(rng.randrange(1, 30), i)]
        drawn = replace(request(str(i), prompt, priority=rng.randrange(3)), sampling=draw_sampling(rng, prompt))
        aborts = str(rng.randrange(i + 1)) if rng.random() < 0.15 else None
        arrivals.append(Arrival(drawn, rng.randrange(5), aborts))
    return arrivals


def work_through(harness: Harness, arrivals: Sequence[Arrival]) -> Harness:
    for arrival in arrivals:
        harness.engine.add(arrival.request)
        for _ in range(arrival.num_steps):
            harness.step()
        if arrival.aborts is not None:
            harness.engine.abort(arrival.aborts)
        harness.engine.pool.check_integrity()
    harness.run()
    harness.engine.check_idle()
    return harness


def work_through_drawn(seed: int, *, run_ahead: bool) -> tuple[Harness, list[Arrival]]:
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=rng.choice([10, 14, 14, 60]),
        max_num_batched_tokens=rng.choice([4, 16, 40]),
        max_num_seqs=rng.choice([4, 6]),
        policy=rng.choice(["fcfs", "priority"]),
        publish=rng.random() < 0.5,
        eos=EOS,
        run_ahead=run_ahead,
    )
    arrivals = draw_arrivals(rng)
    return work_through(harness, arrivals), arrivals


@pytest.mark.parametrize("seed", range(20))
def test_any_workload_has_the_same_tokens(seed: int) -> None:
    """Workloads have shared prefixes, parallel outputs, end tokens, penalties, preemptions, and aborts at any step."""
    ahead, arrivals = work_through_drawn(seed, run_ahead=True)
    plain, _ = work_through_drawn(seed, run_ahead=False)
    aborted = {arrival.aborts for arrival in arrivals}
    for arrival in arrivals:
        request_id, sampling = arrival.request.request_id, arrival.request.sampling
        for index in range(sampling.n):
            key = request_id, index
            expected = expected_output(arrival.request.prompt_token_ids, sampling.max_tokens, choice_index=index)
            assert ahead.tokens[key] == expected[: len(ahead.tokens[key])]
            if request_id not in aborted:
                assert ahead.tokens[key] == plain.tokens[key]
                assert ahead.finished[key] is plain.finished[key]
    assert prompt_reports(ahead, aborted) == prompt_reports(plain, aborted)


def prompt_reports(harness: Harness, aborted: set[str | None]) -> dict[str, int]:
    """Returns how many log-probabilities of the prompt each request has got."""
    found = [prompt for result in harness.results for prompt in result.prompts if prompt.request_id not in aborted]
    assert len({prompt.request_id for prompt in found}) == len(found)
    return {prompt.request_id: len(prompt.prompt_logprobs) for prompt in found}


def test_the_workloads_run_ahead_and_preempt() -> None:
    """Otherwise the tests with these workloads would prove nothing."""
    done = [work_through_drawn(seed, run_ahead=True)[0] for seed in range(5)]
    assert sum(harness.late.num_ahead for harness in done) > sum(h.engine.load().num_steps for h in done) / 3
    assert sum(harness.engine.load().num_preemptions for harness in done) > 5
    assert {FinishReason.STOP, FinishReason.LENGTH} <= {end for h in done for end in h.finished.values()}


def test_the_workloads_notice_blocks_given_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(in_flight: StepsInFlight, block_ids: Sequence[int]) -> None:
        in_flight._pool.release(block_ids)

    monkeypatch.setattr(StepsInFlight, "release", release)
    with pytest.raises(AssertionError, match="handed out while a step may touch them"):
        for seed in range(30):
            work_through_drawn(seed, run_ahead=True)


# -- failures --------------------------------------------------------------------------------------------------------


class FailedStep:
    """A step that fails when it is collected."""

    def __init__(self, step: LaunchedStep) -> None:
        self.only_samples = step.only_samples
        self._step = step

    def collect(self) -> ModelRunnerOutput:
        self._step.collect()
        raise KVRelayError("collected")


class FailingRunner:
    """A runner with some steps that cannot be launched and others that fail when they are collected."""

    def __init__(self, inner: Runner, rng: random.Random) -> None:
        self._inner = inner
        self._rng = rng

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        chance = self._rng.random()
        if chance < 0.03:
            raise KVRelayError("launched")
        step = self._inner.launch(plan)
        return FailedStep(step) if chance > 0.97 else step


@pytest.mark.parametrize("run_ahead", [False, True])
def test_steps_that_fail_end_their_requests_only(run_ahead: bool) -> None:
    messages: Counter[str] = Counter()
    num_complete = 0
    for seed in range(8):
        rng = random.Random(seed)
        arrivals = draw_arrivals(rng)
        harness = Harness(
            num_blocks=rng.choice([12, 60]),
            max_num_batched_tokens=16,
            max_num_seqs=3,
            run_ahead=run_ahead,
            wrap=lambda runner, rng=rng: FailingRunner(runner, rng),  # type: ignore[misc]
        )
        work_through(harness, arrivals)
        failures = [failure for result in harness.results for failure in result.failures]
        messages.update(failure.message for failure in failures)
        gone = {failure.request_id for failure in failures}
        assert len(gone) == len(failures)
        gone |= {arrival.aborts for arrival in arrivals if arrival.aborts is not None}
        for arrival in arrivals:
            wanted = arrival.request
            for index in range(wanted.sampling.n):
                key = wanted.request_id, index
                tokens = harness.tokens[key]
                expected = expected_output(wanted.prompt_token_ids, wanted.sampling.max_tokens, choice_index=index)
                assert tokens == expected[: len(tokens)]
                assert key in harness.finished or wanted.request_id in gone
                num_complete += key in harness.finished
    assert min(messages["launched"], messages["collected"]) > 2
    assert num_complete > 50


# -- a real model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model = make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), vocab_size=320)
    return load_model(str(model), dtype="float32", attention=select_backend("reference"), max_model_len=None)


def test_a_model_samples_the_same_tokens(loaded: LoadedModel) -> None:
    """The requests have seeds, penalties, limits of length, log-probabilities, parallel outputs and preemptions."""
    model = loaded.config
    found: list[dict[tuple[str, int], list[int]]] = []
    for run_ahead in (False, True):
        memory = torch.zeros(12, model.num_kv_heads, model.num_layers, 2, BLOCK_SIZE, model.head_dim)
        runner: Runner = CpuRunner(loaded.model, Sampler(model.eos_token_ids), memory)
        late = LateRunner(runner)
        engine = Engine(
            SchedulerConfig(
                BLOCK_SIZE,
                max_num_seqs=6,
                max_num_batched_tokens=24,
                max_num_mixed_tokens=24,
                max_model_len=12 * BLOCK_SIZE,
            ),
            late if run_ahead else runner,
            BlockPool(12, retract=lambda block_ids: None),
            NAMESPACE,
            eos_token_ids=model.eos_token_ids,
            publish=False,
            run_ahead=run_ahead,
        )
        found.append(generate(engine, random.Random(0)))
        assert engine.load().num_preemptions > 0
        assert (late.num_ahead > 5) is run_ahead
    assert found[0] == found[1]


def generate(engine: Engine, rng: random.Random) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    busy = True
    for i in range(8):
        sampling = SamplingParams(
            n=rng.choice([1, 1, 2]),
            max_tokens=rng.randrange(8, 60),
            min_tokens=rng.choice([0, 6]),
            temperature=rng.choice([0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=1.3 if i == 7 else 1.0,
            stop_token_ids=tuple(rng.sample(range(320), 8)),
            seed=i,
            logprobs=rng.choice([None, 2]),
        )
        prompt = tuple(rng.randrange(320) for _ in range(rng.randrange(1, 30)))
        engine.add(EngineRequest(str(i), prompt, sampling))
    while busy:
        result, busy = engine.step()
        for item in () if result is None else result.outputs:
            tokens.setdefault((item.request_id, item.output.index), []).extend(item.output.token_ids)
    engine.check_idle()
    return tokens
