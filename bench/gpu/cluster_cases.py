"""A prefill and a decode node on one GPU. Their tokens have to be those of one process, whichever way the KV goes.

This needs all packages that `kvrelay serve` needs, such as pydantic and gRPC's health service.
"""

import asyncio
import importlib
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.gpu.greedy import greedy_error
from bench.gpu.measure import Rates
from bench.gpu.report import Result
from bench.gpu.task import Task
from bench.local_cluster import ClusterAddress, local_cluster
from bench.random_model import SHAPES, write_random_model
from kvrelay.bench.base import Answer, Generation
from kvrelay.bench.grpc_client import GrpcClient
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.config.option_types import DeviceName
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.offline.llm import LLM
from kvrelay.offline.prompts import Prompt

_FIRST_ID = 300  # behind bytes and special tokens
# What the processes of a cluster import. In this one a missing package is an error that can be told from a wrong
# result.
PROCESS_MODULES = (
    "kvrelay.cli.serve",
    "kvrelay.node.process",
    "kv_connector.segments.shared_memory",
    "prefill_node.service",
    "decode_node.service",
    "router.app",
)


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Requests that are sent one at a time: one for each number of prompt tokens in `prompts`, with `new` output tokens
    each. `device` is the nodes' setting of that name."""

    device: DeviceName
    shape: str
    prompts: tuple[int, ...]
    new: int


def import_process_modules() -> None:
    """Raises ModuleNotFoundError when a package is missing that a process of the cluster needs."""
    for name in PROCESS_MODULES:
        importlib.import_module(name)


def cluster_tasks(load: ClusterLoad, ways: Sequence[str], rates: Rates, seed: int, directory: Path) -> Iterator[Task]:
    """Yields 1P+1D on the GPU for each `--kv-device-transfer` in `ways`. The time is that from the first token to the
    second, which includes the hand-over and a decode step; the floor is a copy of the prompt's KV on the GPU. Tokens
    are wrong that the same model in this process finds unlikely, or that differ from those of the first way that
    worked."""
    first: list[list[tuple[int, ...]]] = []
    for way in ways:
        served: list[tuple[Answered, float]] = []
        start = f"1P+1D {load.shape} {way}: tokens"
        yield Task(start, partial(_serve, start, served, first, directory, way, load, seed))
        for answered, error in served:
            name = f"1P+1D {load.shape} {way}, second token of {len(answered.prompt)}"
            floor = rates.floor_seconds(2 * len(answered.prompt) * _kv_bytes(load.shape), 0)
            yield Task(name, partial(Result, name, error, answered.hand_over, floor))


def _kv_bytes(shape: str) -> int:
    """Returns the bytes of one token's KV in bfloat16."""
    config = SHAPES[shape]()
    head_dim = config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and its output. `hand_over` is the seconds between the first token and the second."""

    prompt: list[int]
    tokens: tuple[int, ...]
    hand_over: float


def _serve(
    name: str,
    served: list[tuple[Answered, float]],
    first: list[list[tuple[int, ...]]],
    directory: Path,
    way: str,
    load: ClusterLoad,
    seed: int,
) -> Result:
    """Serves the requests with a new cluster. The result's seconds are those of all requests together."""
    model = directory / "model"
    if not model.exists():
        write_random_model(model, load.shape, seed=seed % 2**31, device=load.device)
    with _cluster(model, way, load) as address:
        start = time.perf_counter()
        answers = asyncio.run(_ask(address.grpc, load, seed))
        seconds = time.perf_counter() - start
    errors = _errors(model, load, answers)
    served += list(zip(answers, errors, strict=True))[1:]
    first.append([answered.tokens for answered in answers])
    return Result(name, max(errors) if first[-1] == first[0] else float("inf"), seconds, 0.0)


def _errors(model: Path, load: ClusterLoad, answers: Sequence[Answered]) -> list[float]:
    """Returns how far each answer's tokens are from the likeliest by the model in this process, as `greedy_error`
    does."""
    length = max(load.prompts) + load.new + 1
    num_blocks = length // 16 + 2
    llm = LLM(str(model), device=load.device, max_model_len=length, max_num_seqs=1, num_blocks=num_blocks)
    texts: list[Prompt] = [[*answered.prompt, *answered.tokens] for answered in answers]
    found = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=1), progress=False)
    return [greedy_error(one.prompt_logprobs[-load.new :], torch.bfloat16) for one in found]


def _cluster(model: Path, way: str, load: ClusterLoad) -> AbstractContextManager[ClusterAddress]:
    options = ["--prefill-nodes", "1", "--decode-nodes", "1", "--device", load.device]
    if load.device == "cuda":
        options += ["--kv-device-transfer", way]
    # Nothing is prefilled on the decode node, so that all KV moves.
    options += ["--local-prefill-max-tokens", "0", "--log-level", "info"]
    return local_cluster(str(model), options)


async def _ask(address: str, load: ClusterLoad, seed: int) -> list[Answered]:
    client = GrpcClient(address, Generation(temperature=0.0, ignore_eos=True, timeout=120.0), MonotonicClock())
    try:
        await client.resolve_model("")
        draw = random.Random(seed)
        vocab_size = SHAPES[load.shape]().vocab_size
        answers = []
        for length in (load.prompts[0], *load.prompts):  # the first one warms up
            prompt = [draw.randrange(_FIRST_ID, vocab_size) for _ in range(length)]
            answer = Answer()
            await (await client.prepare(tuple(prompt), load.new))(answer)
            if answer.failure is not None or len(answer.arrivals) < 2 or len(answer.token_ids) != load.new:
                raise RuntimeError(f"a request over 1P+1D failed: {answer.failure}")
            answers.append(Answered(prompt, answer.token_ids, answer.arrivals[1] - answer.arrivals[0]))
        return answers
    finally:
        await client.close()
