"""Whole models from their files through `LLM`, on the GPU compared with the same model on the processor. The time is
that of the start: loading, the memory profile, recorded steps."""

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
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.offline.llm import LLM
from kvrelay.offline.request_output import RequestOutput

_DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"  # trained: no two tokens are nearly as likely
_PROMPTS = ["The capital of France is", "Water freezes at", "A week has", "The capital of France is Paris. Water"]
_FIXED: Mapping[str, Any] = MappingProxyType({"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256})


@dataclass(frozen=True, slots=True)
class Kind:
    """A model and its options. `allowed` is how far log-probabilities may be from the processor's; with `same_tokens`,
    greedy tokens have to be equal, too."""

    name: str
    allowed: float
    same_tokens: bool = False
    prequantized: PrequantizedMethod | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


KINDS = (
    Kind("float32", 2e-3, True, options={"dtype": "float32", "num_blocks": 64}),
    Kind("float32, launched one by one", 2e-3, True,
         options={"dtype": "float32", "num_blocks": 64, "enforce_eager": True}),
    Kind("bfloat16, the pool as large as it may be", 0.2, options={"dtype": "bfloat16"}),
    Kind("FP8 KV", 0.05, options={
        "dtype": "float32", "num_blocks": 64, "kv_cache_dtype": "fp8", "calculate_kv_scales": True,
    }),
    Kind("AWQ", 0.02, prequantized="awq", options={"dtype": "float32", "num_blocks": 64}),
    Kind("GPTQ", 0.02, prequantized="gptq", options={"dtype": "float32", "num_blocks": 64}),
    Kind("GPTQ, second format", 0.02, prequantized="gptq_v2", options={"dtype": "float32", "num_blocks": 64}),
    Kind("GPTQ, desc_act", 0.02, prequantized="gptq_desc_act", options={"dtype": "float32", "num_blocks": 64}),
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
    ours, seconds = _speak(path, "cuda" if device == "cuda" else "cpu", options)
    theirs, _ = _speak(path, "cpu", options | {"num_blocks": 64})
    error = max(_distance(one, other) for one, other in zip(ours, theirs, strict=True)) / kind.allowed
    if kind.same_tokens and [_tokens(one) for one in ours] != [_tokens(one) for one in theirs]:
        error = float("inf")
    return Result(name, error, seconds, 0.0)


def _speak(path: Path, device: Literal["cpu", "cuda"], options: Mapping[str, Any]) -> tuple[list[RequestOutput], float]:
    """Returns what the model answers, and the seconds of its start. Options for GPUs have no effect on the
    processor."""
    start = time.perf_counter()
    llm = LLM(str(path), device=device, **_FIXED, **options)
    seconds = time.perf_counter() - start
    sampling = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0, ignore_eos=True)
    return llm.generate(_PROMPTS, sampling, progress=False), seconds


def _distance(one: RequestOutput, other: RequestOutput) -> float:
    pairs = list(zip(one.prompt_logprobs, other.prompt_logprobs, strict=True))
    assert pairs, "a prompt without log-probabilities"
    worst = max(abs(ours.logprob - theirs.logprob) for ours, theirs in pairs)
    return worst if worst == worst else float("inf")


def _tokens(result: RequestOutput) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in result.outputs]
