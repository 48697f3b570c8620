"""The runner for cards under the real engine, on CPU tensors: the tokens of the CPU's engine, whatever is recorded,
padded, mixed, shared or known only on the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from paged_kernels.base import AttentionBackend
from paged_kernels.reference import ReferenceBackend
from paged_kernels.triton_attention import TritonBackend
from torch import Tensor

from bench.gpu.eager_recorder import EagerRecorder
from kvrelay.core.block_hash import KVNamespace
from kvrelay.core.errors import KVRelayError
from kvrelay.core.outputs import TokenLogprobs
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.device_runner import DeviceRunner, StepLimits
from kvrelay.engine.device_sampler import DeviceSampler
from kvrelay.engine.engine import Engine
from kvrelay.engine.memory_profile import largest_step
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.models.loader import LoadedModel, load_model
from kvrelay.engine.plan import UNKNOWN_TOKEN, ScheduledSequence, SchedulerOutput
from kvrelay.engine.request import EngineRequest
from kvrelay.engine.runner import Runner
from kvrelay.engine.sampler import Sampler, SamplingRow
from kvrelay.engine.scheduler import SchedulerConfig
from tests.engine.tiny_models import make_tiny_model

NUM_BLOCKS = 24
LIMITS = StepLimits(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=96)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, seed=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), vocab_size=320)


def load(directory: Path, attention: AttentionBackend) -> LoadedModel:
    return load_model(str(directory), dtype="float32", attention=attention, max_model_len=LIMITS.max_model_len)


def make_pool(loaded: LoadedModel, num_blocks: int = NUM_BLOCKS) -> Tensor:
    config = loaded.config
    return torch.zeros(num_blocks, config.num_kv_heads, config.num_layers, 2, 16, config.head_dim)


def device_runner(loaded: LoadedModel, recorder: EagerRecorder | None) -> DeviceRunner:
    sampler = DeviceSampler(loaded.config.vocab_size, loaded.config.eos_token_ids)
    return DeviceRunner(loaded.model, sampler, make_pool(loaded), LIMITS, recorder)


def cpu_runner(directory: Path) -> ModelRunner:
    loaded = load(directory, ReferenceBackend())
    return ModelRunner(loaded.model, Sampler(loaded.config.vocab_size, loaded.config.eos_token_ids), make_pool(loaded))


@dataclass(slots=True)
class Spoken:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def speak(
    runner: Runner, requests: Sequence[Sequence[EngineRequest]], *, run_ahead: bool
) -> dict[tuple[str, int], Spoken]:
    """Each group of requests is added when the group before has had its first tokens. By request and output; a prompt's
    own log-probabilities are output -1."""
    config = SchedulerConfig(16, LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, LIMITS.max_model_len)
    pool = BlockPool(NUM_BLOCKS, on_evict=lambda block_ids: None)
    namespace = KVNamespace(bytes(32), "float32", "test", 16)
    engine = Engine(config, runner, pool, namespace, eos_token_ids=(), publish=False, run_ahead=run_ahead)
    found: dict[tuple[str, int], Spoken] = {}
    groups = iter(requests)
    awaited: set[str] = set()
    busy = True
    while busy:
        if not awaited - {name for name, _ in found}:
            for request in next(groups, ()):
                awaited.add(request.request_id)
                engine.add(request)
        result, busy = engine.step()
        if result is None:
            continue
        assert not result.failures
        for prompt in result.prompts:
            found.setdefault((prompt.request_id, -1), Spoken()).logprobs.extend(prompt.prompt_logprobs)
        for output in result.outputs:
            spoken = found.setdefault((output.request_id, output.output.index), Spoken())
            spoken.token_ids.extend(output.output.token_ids)
            spoken.logprobs.extend(output.output.logprobs)
    engine.check_idle()
    return found


def mixed_requests() -> list[list[EngineRequest]]:
    """Long and short prompts, a shared prefix, parallel outputs, penalties, seeds and log-probabilities."""
    shared = tuple(range(40, 76))
    several = SamplingParams(n=2, seed=5, temperature=0.8, top_p=0.9, max_tokens=4)
    penalised = SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=5)
    explained = SamplingParams(temperature=0.0, seed=0, logprobs=3, prompt_logprobs=2, max_tokens=3)
    return [
        [EngineRequest("first", (*shared, 7), GREEDY), EngineRequest("short", (9, 8), GREEDY)],
        [EngineRequest("again", (*shared, 200, 201), GREEDY), EngineRequest("several", (31, 32, 33), several)],
        [EngineRequest("penalised", (5, 5, 6), penalised), EngineRequest("explained", (1, 2, 3, 4), explained)],
    ]


def close(logprobs: Sequence[TokenLogprobs]) -> list[object]:
    return [
        (
            one.token_id,
            pytest.approx(one.logprob, abs=1e-3),
            one.rank,
            [(top, pytest.approx(value, abs=1e-3)) for top, value in one.top],
        )
        for one in logprobs
    ]


def exact(logprobs: Sequence[TokenLogprobs]) -> list[object]:
    return [(one.token_id, one.logprob, one.rank, list(one.top)) for one in logprobs]


def test_the_engine_speaks_the_tokens_of_the_cpu(directory: Path) -> None:
    recorder = EagerRecorder()
    runner = device_runner(load(directory, TritonBackend()), recorder)
    expected = speak(cpu_runner(directory), mixed_requests(), run_ahead=False)
    found = speak(runner, mixed_requests(), run_ahead=True)
    assert {name: spoken.token_ids for name, spoken in found.items()} == {
        name: spoken.token_ids for name, spoken in expected.items()
    }
    for name, spoken in found.items():
        assert exact(spoken.logprobs) == close(expected[name].logprobs)
    assert found["explained", -1].logprobs and found["explained", 0].logprobs
    assert 6 in recorder.replayed and set(recorder.replayed) <= {1, 2, 4, 6}


def decode(token_id: int, position: int, table: Sequence[int], input_row: int | None = None) -> ScheduledSequence:
    row = SamplingRow(GREEDY, 0, position + 1, 1, (), ())
    return ScheduledSequence((token_id,), position, table, (row,), input_row=input_row)


def tokens_of(runner: DeviceRunner, plans: Iterator[SchedulerOutput] | Sequence[SchedulerOutput]) -> list[list[int]]:
    """Every step is launched before the one before it is collected."""
    found = []
    before = None
    for plan in plans:
        launched = runner.launch(plan)
        if before is not None:
            found.append(before.collect())
        before = launched
    assert before is not None
    found.append(before.collect())
    return [[token.token_id for result in output.results for token in result.sampled] for output in found]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_step_reads_tokens_that_the_host_does_not_know_yet(directory: Path, recorded: bool) -> None:
    loaded = load(directory, TritonBackend())
    tables = ([3], [5])
    prompts = tuple(
        ScheduledSequence(prompt, 0, table, (SamplingRow(GREEDY, 0, len(prompt), 0, (), ()),))
        for prompt, table in zip(((5, 6, 7), (8, 9)), tables, strict=True)
    )
    [first] = tokens_of(device_runner(loaded, None), [SchedulerOutput(prompts, ())])
    runner = device_runner(loaded, EagerRecorder() if recorded else None)
    known = SchedulerOutput((decode(first[0], 3, tables[0]), decode(first[1], 2, tables[1])), ())
    _, expected = tokens_of(runner, [SchedulerOutput(prompts, ()), known])
    swapped = (decode(UNKNOWN_TOKEN, 2, tables[1], 1), decode(UNKNOWN_TOKEN, 3, tables[0], 0))
    _, found = tokens_of(runner, [SchedulerOutput(prompts, ()), SchedulerOutput(swapped, ())])
    assert found == expected[::-1]
    beside = (swapped[1], ScheduledSequence((8, 9), 0, tables[1], ()))  # a mixed step is never recorded
    _, found = tokens_of(runner, [SchedulerOutput(prompts, ()), SchedulerOutput(beside, ())])
    assert found == expected[:1]


def test_a_row_that_failed_fails_its_step_and_no_other(directory: Path) -> None:
    loaded = load(directory, TritonBackend())
    sampler = DeviceSampler(loaded.config.vocab_size, loaded.config.eos_token_ids)
    pool = make_pool(loaded)
    pool[7] = float("nan")
    runner = DeviceRunner(loaded.model, sampler, pool, LIMITS, EagerRecorder())
    broken = runner.launch(SchedulerOutput((decode(5, 3, [7]),), ()))
    after = runner.launch(SchedulerOutput((decode(UNKNOWN_TOKEN, 3, [6], 0),), ()))
    with pytest.raises(KVRelayError, match="not finite"):
        broken.collect()
    [result] = after.collect().results
    assert result.sampled[0].token_id >= 0


def test_blocks_are_copied_before_anything_is_written(directory: Path) -> None:
    loaded = load(directory, TritonBackend())
    runner = device_runner(loaded, EagerRecorder())
    prompt = ScheduledSequence((5, 6, 7), 0, [2], ())
    plans = [SchedulerOutput((prompt,), ()), SchedulerOutput((decode(8, 3, [4]), decode(8, 3, [2])), ((2, 4),))]
    [_, both] = tokens_of(runner, plans)
    assert both[0] == both[1]


def test_the_largest_step_runs_in_one_block(directory: Path) -> None:
    loaded = load(directory, TritonBackend())
    sampler = DeviceSampler(loaded.config.vocab_size, loaded.config.eos_token_ids)
    runner = DeviceRunner(loaded.model, sampler, make_pool(loaded, 1), LIMITS)
    plan = largest_step(LIMITS, 16)
    assert plan.num_scheduled_tokens == 24 and len(plan.scheduled) == 6
    assert len(runner.launch(plan).collect().results) == 6
