"""A whole model on Triton's kernels: prefill in chunks, then decoding, draws the tokens of the host's path."""

from pathlib import Path

from paged_kernels.gpu.attention import TritonBackend
from paged_kernels.reference import ReferenceBackend

from kvrelay.core.config.option_types import KVCacheDType
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.cpu.runner import CpuRunner
from kvrelay.engine.gpu.runner import GpuRunner, StepLimits
from kvrelay.engine.gpu.sampler import GpuSampler
from kvrelay.engine.kv_cache_dtype import choose_kv_scales, kv_layout
from kvrelay.engine.kv_pool import allocate_pool
from kvrelay.engine.loading.loader import load_model
from kvrelay.engine.plan import ScheduledSequence, SchedulerOutput
from kvrelay.engine.runner import Runner
from kvrelay.engine.sampling.sampler import Sampler, SamplingRow
from tests.engine.sampling.seen_after import seen_after
from tests.engine.tiny_models import make_tiny_model

VOCAB_SIZE = 320
LIMITS = StepLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64)
PROMPTS = (tuple(range(5, 45)), (7, 7, 200, 31))
TABLES = ([4, 1, 6], [2, 5, 0])
PARAMS = (SamplingParams(temperature=0.0), SamplingParams(seed=3, top_p=0.9, repetition_penalty=1.2))


def generate(
    directory: Path,
    backend: type[ReferenceBackend | TritonBackend],
    *,
    kv_cache_dtype: KVCacheDType = "auto",
) -> list[list[int]]:
    loaded = load_model(str(directory), dtype="float32", attention=backend(), max_model_len=None)
    config = loaded.config
    kv_scales = choose_kv_scales(loaded, kv_cache_dtype, calculate=kv_cache_dtype != "auto")
    loaded.model.attend_with(backend(kv_scales))
    pool = allocate_pool(kv_layout(loaded, 16, kv_scales), 8)
    runner: Runner = (
        CpuRunner(loaded.model, Sampler(config.eos_token_ids), pool)
        if backend is ReferenceBackend
        else GpuRunner(loaded.model, GpuSampler(config.eos_token_ids), pool, LIMITS)
    )
    first = ScheduledSequence(PROMPTS[0][:20], 0, TABLES[0], ())
    runner.launch(SchedulerOutput((first,), ())).collect()
    outputs: list[list[int]] = [[], []]
    for _ in range(4):
        steps = []
        for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
            seen = seen_after(PARAMS[index], prompt, output)
            row = SamplingRow(PARAMS[index], 0, len(prompt) + len(output), len(output), seen)
            start = len(prompt) + len(output) - 1 if output else 20 * (1 - index)
            steps.append(ScheduledSequence((*prompt, *output)[start:], start, TABLES[index], (row,)))
        results = runner.launch(SchedulerOutput(tuple(steps), ())).collect().results
        for output, result in zip(outputs, results, strict=True):
            output.append(result.sampled[0].token_id)
    return outputs


def test_tokens_of_a_sliding_window_model(tmp_path: Path) -> None:
    directory = make_tiny_model("mistral", tmp_path, vocab_size=VOCAB_SIZE)
    expected = generate(directory, ReferenceBackend)
    assert generate(directory, TritonBackend) == expected
    assert len({*expected[0], *expected[1]}) > 2


def test_tokens_over_an_fp8_pool(tmp_path: Path) -> None:
    directory = make_tiny_model("qwen3", tmp_path, vocab_size=VOCAB_SIZE)
    expected = generate(directory, ReferenceBackend, kv_cache_dtype="fp8")
    assert generate(directory, TritonBackend, kv_cache_dtype="fp8") == expected
    assert len({*expected[0], *expected[1]}) > 2
