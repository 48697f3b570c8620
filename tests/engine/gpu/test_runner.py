"""Steps for a GPU, carried out over tensors without memory: a read from the device between launch and collect raises,
and so does mixing devices. Shapes are those of a real model; nothing is computed, and no GPU is needed."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_kernels.gpu import attention, prequantized
from paged_kernels.gpu.attention import TritonBackend
from paged_kernels.gpu.launch import GpuTraits
from paged_kernels.gpu.prequantized import prequantized_matmul
from paged_kernels.prequantized_weight import PrequantizedFormat, PrequantizedWeight
from torch import Tensor
from triton.runtime import JITFunction

from bench.gpu.eager_recorder import EagerRecorder
from kvrelay.core.generation.sampling_params import MAX_LOGPROBS, SamplingParams
from kvrelay.engine.gpu import runner as gpu_runner
from kvrelay.engine.gpu import sampler as gpu_sampler
from kvrelay.engine.gpu.logprobs import LaunchedLogprobs, launch_logprobs
from kvrelay.engine.gpu.memory_profile import largest_step, smaller_steps
from kvrelay.engine.gpu.runner import GpuRunner, StepLimits
from kvrelay.engine.gpu.sampler import GpuSampler
from kvrelay.engine.layers.rotary import RopeKind, RopeParameters
from kvrelay.engine.layers.weight_format import WeightFormat
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.models.model_config import ModelConfig
from kvrelay.engine.plan import UNKNOWN_TOKEN, ScheduledSequence, SchedulerOutput
from kvrelay.engine.sampling.fixed_edits import fixed_edits
from kvrelay.engine.sampling.logprobs import PROMPT_LOGPROB_ROWS
from kvrelay.engine.sampling.penalties import changes_logits, seen_tokens
from kvrelay.engine.sampling.sampler import SamplingRow
from tests.engine.sampling.seen_after import seen_after

META = torch.device("meta")
LIMITS = StepLimits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096)
CONFIG = ModelConfig(
    family="llama",
    hidden_size=4096,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope=RopeParameters(RopeKind.DEFAULT, 10_000.0, 4096),
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    sliding_windows=(None, 1024),
    eos_token_ids=(),
    dtype=None,
    quantization=None,
)
GREEDY = SamplingRow(SamplingParams(temperature=0.0, seed=0), 0, 41, 1)
SAMPLED = SamplingParams(
    seed=1, top_p=0.9, top_k=5, min_p=0.1, logprobs=3, repetition_penalty=1.2, logit_bias=((3, 1.0),), min_tokens=9
)
LONG = SamplingRow(SAMPLED, 0, 1041, 41, seen_tokens(SAMPLED, range(1000)), fixed_edits(SAMPLED))  # 16 kB of penalties
EDITED = SamplingRow(SAMPLED, 0, 41, 1, seen_after(SAMPLED, (1, 2, 3), (4, 5)), fixed_edits(SAMPLED))


@pytest.fixture(autouse=True)
def a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    traits = GpuTraits(num_sms=132, shared_bytes=227 << 10)
    monkeypatch.setattr(attention, "traits_of", lambda device: traits)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts launched kernels by name, and checks that every tensor they get is on the device."""
    names: Counter[str] = Counter()

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(**arguments: Any) -> None:
            assert all(value.device == META for value in arguments.values() if isinstance(value, Tensor))
            assert set(kernel.arg_names) <= set(arguments)
            assert all(count < 1 << 16 for count in grid[1:])  # what CUDA allows
            names[kernel.__name__] += 1

        return launch

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    yield names


@pytest.fixture(scope="module")
def model() -> DecoderForCausalLM:
    weights = WeightFormat(torch.bfloat16, META)
    return DecoderForCausalLM(CONFIG, TritonBackend(), max_model_len=LIMITS.max_model_len, weights=weights)


def make_runner(model: DecoderForCausalLM, recorder: EagerRecorder | None, limits: StepLimits = LIMITS) -> GpuRunner:
    pool = torch.empty(4096, 8, 2, 2, 16, 128, dtype=torch.bfloat16, device=META)
    return GpuRunner(model, GpuSampler(()), pool, limits, recorder)


def decodes(count: int, row: SamplingRow) -> SchedulerOutput:
    """Returns decodes of tokens that only the device knows."""
    sequences = [ScheduledSequence((UNKNOWN_TOKEN,), 40, (1, 2, 3), (row,), input_row=at) for at in range(count)]
    return SchedulerOutput(tuple(sequences), ((1, 2),))


@pytest.mark.parametrize(
    ("count", "row", "replayed"), [(3, GREEDY, 4), (64, GREEDY, 64), (3, EDITED, 4), (3, LONG, 4), (8, LONG, None)]
)
def test_a_step_of_decodes_is_padded_and_replayed_if_it_fits_without_reading_the_gpu(
    model: DecoderForCausalLM, launched: Counter[str], count: int, row: SamplingRow, replayed: int | None
) -> None:
    """Block tables of full width would take 64 kB, which steps with narrow ones have for penalties."""
    recorder = EagerRecorder()
    runner = make_runner(model, recorder)
    launched.clear()
    runner.launch(decodes(count, row))
    assert recorder.replayed == ([] if replayed is None else [replayed])
    assert launched["decode_attention_kernel"] == launched["write_kv_kernel"] == CONFIG.num_layers
    assert launched["sample_kernel"] == 1 and not launched["prefill_attention_kernel"]


def test_a_mixed_step_launches_both_kinds_of_attention_without_reading_the_gpu(
    model: DecoderForCausalLM, launched: Counter[str]
) -> None:
    prompt = ScheduledSequence((7,) * 100, 0, tuple(range(10)), (EDITED, GREEDY), prompt_logprobs=(2, (1,) * 99))
    decode = ScheduledSequence((UNKNOWN_TOKEN,), 40, (1, 2, 3), (GREEDY,), input_row=0)
    make_runner(model, None).launch(SchedulerOutput((decode, prompt), ()))
    assert launched["prefill_attention_kernel"] == launched["decode_attention_kernel"] == CONFIG.num_layers


def test_the_largest_step_runs_without_reading_the_gpu(model: DecoderForCausalLM, launched: Counter[str]) -> None:
    make_runner(model, None).launch(largest_step(LIMITS, 16))
    assert launched["sample_kernel"] == 1
    assert launched["prefill_attention_kernel"] == CONFIG.num_layers, "prompts that want log-probabilities need most"


@pytest.mark.parametrize("max_num_seqs", [1, 64, 512])
def test_the_largest_step_has_as_many_log_probabilities_as_may_be(
    model: DecoderForCausalLM, launched: Counter[str], max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That holds for sampled tokens and for a prompt, as many of whose rows are computed at a time as it has tokens."""
    taken: list[tuple[str, int, int]] = []

    def recorder(of: str) -> Callable[[Tensor, Tensor, Sequence[int]], LaunchedLogprobs]:
        def record(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> LaunchedLogprobs:
            assert len(logits) == len(token_ids) == len(num_top)
            taken.append((of, len(num_top), min(num_top)))
            return launch_logprobs(logits, token_ids, num_top)

        return record

    monkeypatch.setattr(gpu_sampler, "launch_logprobs", recorder("output"))
    monkeypatch.setattr(gpu_runner, "launch_logprobs", recorder("prompt"))
    limits = replace(LIMITS, max_num_seqs=max_num_seqs)
    plan = largest_step(limits, 16)
    make_runner(model, None, limits).launch(plan)
    prompts = {("prompt", PROMPT_LOGPROB_ROWS, MAX_LOGPROBS)} if max_num_seqs < 512 else set()
    assert {("output", max_num_seqs, MAX_LOGPROBS), *prompts} <= set(taken)
    [params] = {row.params for entry in plan.scheduled for row in entry.rows}
    assert params.top_k and params.top_p < 1.0 and changes_logits(params, 0)


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("max_num_seqs", [1, 64])
def test_every_way_to_launch_attention_is_compiled_at_the_start(
    model: DecoderForCausalLM, max_num_seqs: int, records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That holds whether or not the last layer keeps all tokens of a prompt."""
    limits = replace(LIMITS, max_num_seqs=max_num_seqs, max_num_batched_tokens=2048)
    ways: set[tuple[object, ...]] = set()

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
        constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
        return lambda **given: ways.add((kernel.__name__, *(given.get(name) for name in constants)))

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    runner = make_runner(model, EagerRecorder() if records else None, limits)
    for plan in (largest_step(limits, 16), *smaller_steps(limits, 16)):
        runner.launch(plan)
    at_the_start = set(ways)
    decode = ScheduledSequence((UNKNOWN_TOKEN,), 40, (1, 2, 3), (GREEDY,), input_row=0)
    for count, end in itertools.product((2, 40, 500, 1500), (1500, 2000, 3000, 4095)):
        prompt = ScheduledSequence((7,) * count, end - count, tuple(range(256)), (GREEDY,))
        for each in (prompt, replace(prompt, rows=()), replace(prompt, prompt_logprobs=(0, ()))):
            runner.launch(SchedulerOutput((each,), ()))
            if max_num_seqs > 1:
                runner.launch(SchedulerOutput((decode, each), ()))
    assert ways == at_the_start
    assert {name for name, *_ in ways} >= {"decode_attention_kernel", "merge_splits_kernel", "prefill_attention_kernel"}


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(4096, 6144), (4096, 28672), (14336, 4096), (512, 512)])
def test_every_way_to_launch_a_product_of_quantised_weights_is_compiled_at_the_start(
    num_inputs: int, num_outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = torch.empty(num_inputs, num_outputs // 8, dtype=torch.int32, device=META)
    zeros = torch.empty(num_inputs // 128, num_outputs // 8, dtype=torch.int32, device=META)
    scales = torch.empty(num_inputs // 128, num_outputs, dtype=torch.float16, device=META)
    weight = PrequantizedWeight(PrequantizedFormat.AWQ, codes, zeros, scales, 128)
    ways: set[tuple[object, ...]] = set()

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
        return lambda **given: ways.add((kernel.__name__, given.get("TILE_ROWS"), given["output"].dtype))

    def ways_of(lengths: Iterable[int]) -> set[tuple[object, ...]]:
        ways.clear()
        for length in lengths:
            prequantized_matmul(torch.empty(length, num_inputs, dtype=torch.float16, device=META), weight)
        return set(ways)

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(prequantized, "traits_of", lambda device: GpuTraits(num_sms=132, shared_bytes=227 << 10))
    at_the_start = ways_of(plan.num_scheduled_tokens for plan in smaller_steps(LIMITS, 16))
    assert at_the_start == ways_of(range(1, LIMITS.max_num_batched_tokens + 1))


def test_a_read_of_the_gpu_is_noticed() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(1, device=META).item()
