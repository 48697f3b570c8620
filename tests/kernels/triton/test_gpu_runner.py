"""The runner for GPUs under the real engine, on CPU tensors: the tokens of the CPU's engine, whatever is recorded,
padded, mixed, shared or known only on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from paged_kernels.base import AttentionBackend
from paged_kernels.gpu.attention import TritonBackend
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from bench.gpu.eager_recorder import EagerRecorder
from kvrelay.core.errors import ModelLoadError
from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.cpu.runner import CpuRunner
from kvrelay.engine.engine import Engine
from kvrelay.engine.gpu import memory_profile
from kvrelay.engine.gpu.memory_profile import graph_bytes, largest_step, profile_memory
from kvrelay.engine.gpu.runner import GpuRunner, StepLimits
from kvrelay.engine.gpu.sampler import GpuSampler
from kvrelay.engine.gpu.startup import size_gpu_pool
from kvrelay.engine.gpu.step_graphs import RecordedStep, Step
from kvrelay.engine.layers.rotary import RopeKind, RopeParameters
from kvrelay.engine.layers.weight_format import WeightFormat
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.models.model_config import ModelConfig
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.plan import UNKNOWN_TOKEN, ScheduledSequence, SchedulerOutput
from kvrelay.engine.request import EngineRequest
from kvrelay.engine.runner import Runner
from kvrelay.engine.sampling.sampler import NO_TOKEN, Sampler, SamplingRow
from kvrelay.engine.scheduler import SchedulerConfig

NUM_BLOCKS = 24
LIMITS = StepLimits(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64)
VOCAB_SIZE = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, seed=0)
CONFIG = ModelConfig(
    family="llama",
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    vocab_size=VOCAB_SIZE,
    rms_norm_eps=1e-5,
    rope=RopeParameters(RopeKind.DEFAULT, 10_000.0, 64),
    max_position_embeddings=64,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None, 24),
    eos_token_ids=(),
    dtype=None,
    quantization=None,
)
LAYOUT = KVLayout(num_kv_heads=1, num_layers=2, block_size=16, head_dim=CONFIG.head_dim, dtype="float32")


def make_model(attention: AttentionBackend) -> DecoderForCausalLM:
    """Makes a model, with the same weights each time."""
    weights = WeightFormat(torch.float32, torch.device("cpu"))
    model = DecoderForCausalLM(CONFIG, attention, max_model_len=LIMITS.max_model_len, weights=weights)
    generator = torch.Generator().manual_seed(4)
    for slot in model.checkpoint_slots().values():
        slot.filled(slot.open().normal_(0.0, 0.4, generator=generator))
    model.pack()
    return model


def make_pool(num_blocks: int = NUM_BLOCKS) -> Tensor:
    return torch.zeros(num_blocks, CONFIG.num_kv_heads, CONFIG.num_layers, 2, 16, CONFIG.head_dim)


def make_runner(recorder: EagerRecorder | None, pool: Tensor | None = None) -> GpuRunner:
    kv_pool = make_pool() if pool is None else pool
    return GpuRunner(make_model(TritonBackend()), GpuSampler(()), kv_pool, LIMITS, recorder)


@pytest.fixture(scope="module")
def recorder() -> EagerRecorder:
    return EagerRecorder()


@pytest.fixture(scope="module")
def recorded(recorder: EagerRecorder) -> GpuRunner:
    """Makes a runner whose steps are recorded. Tests write to the memory that they read."""
    return make_runner(recorder)


@dataclass(slots=True)
class Spoken:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def speak(
    runner: Runner, requests: Sequence[Sequence[EngineRequest]], *, run_ahead: bool
) -> dict[tuple[str, int], Spoken]:
    """Runs groups of requests, each added when the group before has had its first tokens. Returns what came, by request
    and output; a prompt's own log-probabilities are output -1."""
    most_tokens = LIMITS.max_num_batched_tokens
    config = SchedulerConfig(16, LIMITS.max_num_seqs, most_tokens, most_tokens, LIMITS.max_model_len)
    pool = BlockPool(NUM_BLOCKS, retract=lambda block_ids: None)
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
    """Returns long and short prompts, a shared prefix, parallel outputs, penalties, seeds and log-probabilities."""
    shared = tuple(range(30, 56))
    several = SamplingParams(n=2, seed=5, temperature=0.8, top_k=9, max_tokens=3)
    penalised = SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=4)
    explained = SamplingParams(temperature=0.0, seed=0, logprobs=3, prompt_logprobs=2, max_tokens=3)
    return [
        [EngineRequest("first", (*shared, 7), GREEDY), EngineRequest("short", (9, 8), GREEDY)],
        [EngineRequest("again", (*shared, 20, 21), GREEDY), EngineRequest("several", (1, 2, 3), several)],
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


def test_the_engine_speaks_the_tokens_of_the_cpu(recorded: GpuRunner, recorder: EagerRecorder) -> None:
    recorder.replayed.clear()
    cpu = CpuRunner(make_model(ReferenceBackend()), Sampler(()), make_pool())
    expected = speak(cpu, mixed_requests(), run_ahead=False)
    found = speak(recorded, mixed_requests(), run_ahead=True)
    assert {name: spoken.token_ids for name, spoken in found.items()} == {
        name: spoken.token_ids for name, spoken in expected.items()
    }
    for name, spoken in found.items():
        assert exact(spoken.logprobs) == close(expected[name].logprobs)
    assert found["explained", -1].logprobs and found["explained", 0].logprobs
    assert len({token for spoken in found.values() for token in spoken.token_ids}) > 5
    assert {2, 4, 16, 24} <= set(recorder.replayed) <= {1, 2, 4, 6, 16, 24}, "decodes, and steps with prompts"


def decode(token_id: int, position: int, table: Sequence[int], input_row: int | None = None) -> ScheduledSequence:
    row = SamplingRow(GREEDY, 0, position + 1, 1)
    return ScheduledSequence((token_id,), position, table, (row,), input_row=input_row)


def prompt(token_ids: Sequence[int], table: Sequence[int]) -> ScheduledSequence:
    return ScheduledSequence(token_ids, 0, table, (SamplingRow(GREEDY, 0, len(token_ids), 0),))


def tokens_of(runner: GpuRunner, plans: Sequence[SchedulerOutput]) -> list[list[int]]:
    """Runs steps, each launched before the one before it is collected. Returns the tokens of each."""
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


@pytest.mark.parametrize("replayed", [True, False])
def test_a_step_reads_tokens_that_the_host_does_not_know_yet(recorded: GpuRunner, replayed: bool) -> None:
    runner = recorded if replayed else make_runner(None)
    tables = ([3], [5])
    prompts = SchedulerOutput((prompt((5, 6, 7), tables[0]), prompt((8, 9), tables[1])), ())
    [first] = tokens_of(runner, [prompts])
    known = SchedulerOutput((decode(first[0], 3, tables[0]), decode(first[1], 2, tables[1])), ())
    [expected] = tokens_of(runner, [known])
    swapped = (decode(UNKNOWN_TOKEN, 2, tables[1], 1), decode(UNKNOWN_TOKEN, 3, tables[0], 0))
    _, found = tokens_of(runner, [prompts, SchedulerOutput(swapped, ())])
    assert found == expected[::-1]
    beside = (swapped[1], ScheduledSequence((8, 9), 0, tables[1], ()))  # mixed
    _, found = tokens_of(runner, [prompts, SchedulerOutput(beside, ())])
    assert found == expected[:1]


def test_a_row_that_failed_has_no_token_and_the_next_step_has() -> None:
    """The next step reads token 0 where that row has none."""
    plan = SchedulerOutput((decode(0, 3, [6]),), ())
    [[undisturbed]] = tokens_of(make_runner(None), [plan])
    pool = make_pool()
    pool[7] = float("nan")
    runner = make_runner(None, pool)
    broken = runner.launch(SchedulerOutput((decode(5, 3, [7]),), ()))
    after = runner.launch(SchedulerOutput((decode(UNKNOWN_TOKEN, 3, [6], 0),), ()))
    assert [result.sampled[0].token_id for result in broken.collect().results] == [NO_TOKEN]
    [result] = after.collect().results
    assert result.sampled[0].token_id == undisturbed


def test_blocks_are_copied_first_and_a_batch_is_padded(recorded: GpuRunner, recorder: EagerRecorder) -> None:
    plans = [
        SchedulerOutput((ScheduledSequence((5, 6, 7), 0, [2], ()),), ()),
        SchedulerOutput((decode(8, 3, [4]), decode(8, 3, [2]), decode(8, 3, [6])), ((2, 4), (2, 6))),
    ]
    _, both = tokens_of(recorded, plans)
    assert both == both[:1] * 3
    assert recorder.replayed[-1] == 4


def test_the_largest_step_runs_in_one_block() -> None:
    plan = largest_step(StepLimits(max_num_seqs=2, max_num_batched_tokens=21, max_model_len=64), 16)
    assert plan.num_scheduled_tokens == 21
    assert len(make_runner(None, make_pool(1)).launch(plan).collect().results) == 2


def test_a_profiled_step_without_a_result_is_not_called_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    model = make_model(TritonBackend())
    model.norm.fill_(float("nan"))
    config = Mock(vocab_size=VOCAB_SIZE, eos_token_ids=())
    loaded: Any = Mock(model=model, config=config, max_model_len=LIMITS.max_model_len)
    options = EngineOptions("m", max_num_seqs=LIMITS.max_num_seqs, max_num_batched_tokens=LIMITS.max_num_batched_tokens)
    with pytest.raises(ModelLoadError, match=r"24 tokens.*not finite.*the checkpoint is damaged.*kernel") as raised:
        size_gpu_pool(options, loaded, LAYOUT)
    assert "memory for" not in str(raised.value)


@dataclass(slots=True)
class ResultBytes:
    """A `StepRecorder` that only adds up what the results of steps take."""

    num_bytes: int = 0

    def record(self, step: Step) -> RecordedStep:
        self.num_bytes += step().nbytes
        return Mock()


def test_memory_is_set_aside_for_the_result_of_each_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(memory_profile, "_run", lambda runner, plan: None)
    model, results = make_model(TritonBackend()), ResultBytes()
    GpuRunner(model, GpuSampler(()), make_pool(), LIMITS, results)
    profile = profile_memory(model, GpuSampler(()), LAYOUT, LIMITS, graphs=True)
    assert profile.graphs == graph_bytes(0, LIMITS) + results.num_bytes
