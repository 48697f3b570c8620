"""Whole models from their files through `LLM`, on the GPU compared with the same model on the processor. The time is
that of the start: loading, the memory profile, recorded steps."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from bench.gpu.report import Result
from bench.gpu.task import Task
from bench.random_model import PrequantizedMethod, write_random_model
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.offline.llm import LLM
from kvrelay.offline.request_output import RequestOutput

_DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"  # trained: no two tokens are nearly as likely
_PROMPTS = ["The capital of France is", "Water freezes at", "A week has", "The capital of France is Paris. Water"]
_GREEDY = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0, ignore_eos=True)
# With this seed each parameter matters, and in no draw are the two best tokens nearly as good.
_SAMPLED = SamplingParams(
    n=2, seed=20, temperature=0.8, top_p=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.6,
    logit_bias={20: -5.0}, logprobs=2, max_tokens=12, ignore_eos=True,
)  # fmt: skip
_FIXED: Mapping[str, Any] = MappingProxyType({"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256})
_PREQUANTIZED: Mapping[str, PrequantizedMethod] = MappingProxyType(
    {"AWQ": "awq", "GPTQ": "gptq", "GPTQ, second format": "gptq_v2", "GPTQ, desc_act": "gptq_desc_act"}
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A model and its options. `allowed` is how far log-probabilities may be from the processor's; with `same_tokens`,
    greedy tokens and sampled ones have to be equal, too."""

    name: str
    allowed: float
    same_tokens: bool = False
    prequantized: PrequantizedMethod | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


KINDS = (
    Kind("float32", 2e-3, True, options={"dtype": "float32", "num_blocks": 64}),
    Kind("float32, launched one by one", 2e-3, True,
         options={"dtype": "float32", "num_blocks": 64, "enforce_eager": True}),
    # Instruction sets of processors differ by up to 0.05.
    Kind("bfloat16, the pool as large as it may be", 0.1, options={"dtype": "bfloat16"}),
    # A code that is rounded the other way makes up to 0.002.
    Kind("FP8 KV", 5e-3, options={
        "dtype": "float32", "num_blocks": 64, "kv_cache_dtype": "fp8", "calculate_kv_scales": True,
    }),
    # Products rounded to float16 make about 0.0005, in float32 0.000001.
    *(Kind(f"{name}, {dtype}", allowed, prequantized=method, options={"dtype": dtype, "num_blocks": 64})
      for name, method in _PREQUANTIZED.items()
      for dtype, allowed in (("float16", 2e-3), ("float32", 2e-4))),
)  # fmt: skip


def model_tasks(kinds: Sequence[Kind], device: torch.device, directory: Path) -> Iterator[Task]:
    for kind in kinds:
        name = f"model {kind.name}: against the processor"
        yield Task(name, partial(_compare, name, kind, device.type, directory))


def _compare(name: str, kind: Kind, device: str, directory: Path) -> Result:
    path = _DEMO
    if kind.prequantized is not None:
        path = write_random_model(directory / kind.prequantized, "small", quantization=kind.prequantized)
    options = dict(kind.options)
    asked = (_GREEDY, _SAMPLED) if kind.same_tokens else (_GREEDY,)
    ours, seconds = _speak(path, "cuda" if device == "cuda" else "cpu", options, asked)
    theirs, _ = _speak(path, "cpu", options | {"num_blocks": 64}, asked)
    if kind.same_tokens and [_tokens(one) for one in ours] != [_tokens(one) for one in theirs]:
        return Result(name, math.inf, seconds, 0.0)
    error = max(_distance(one, other) for one, other in zip(ours, theirs, strict=True)) / kind.allowed
    return Result(name, error, seconds, 0.0)


def _speak(
    path: Path, device: Literal["cpu", "cuda"], options: Mapping[str, Any], asked: Sequence[SamplingParams]
) -> tuple[list[RequestOutput], float]:
    """Returns what the model answers to the prompts, asked in each of these ways, and the seconds of its start. Options
    for GPUs have no effect on the processor."""
    start = time.perf_counter()
    llm = LLM(str(path), device=device, **_FIXED, **options)
    seconds = time.perf_counter() - start
    return [answer for sampling in asked for answer in llm.generate(_PROMPTS, sampling, progress=False)], seconds


def _distance(one: RequestOutput, other: RequestOutput) -> float:
    pairs = list(zip(_logprobs(one), _logprobs(other), strict=True))
    assert pairs, "an answer without log-probabilities"
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _logprobs(answer: RequestOutput) -> list[float]:
    """Returns the log-probabilities of the prompt's tokens, of the answers' tokens, and of the likeliest beside
    those."""
    of_outputs = [one for output in answer.outputs for one in output.logprobs]
    likeliest = [logprob for one in of_outputs for _, logprob in one.top]
    return [*(one.logprob for one in (*answer.prompt_logprobs, *of_outputs)), *likeliest]


def _tokens(answer: RequestOutput) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in answer.outputs]
