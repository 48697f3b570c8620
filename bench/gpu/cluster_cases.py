"""A prefill and a decode node on one card, whose tokens have to be the same whichever way their KV goes.

Needs all that `kvrelay serve` needs, pydantic and gRPC's health service among it.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.gpu.measure import Rates
from bench.gpu.report import Result
from bench.gpu.task import Task
from bench.random_model import SHAPES, write_random_model
from kvrelay.bench.base import Answer, Generation
from kvrelay.bench.grpc_client import GrpcClient
from kvrelay.cli.local_cluster import ClusterAddress, local_cluster
from kvrelay.core.clock import MonotonicClock

_FIRST_ID = 300  # behind bytes and special tokens


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """One request at a time: `prompts`, tokens each; `new` tokens are made of each. `device` as the nodes' setting."""

    device: str
    shape: str
    prompts: tuple[int, ...]
    new: int


def cluster_tasks(load: ClusterLoad, ways: Sequence[str], rates: Rates, seed: int, directory: Path) -> Iterator[Task]:
    """1P+1D on the card, for each `--kv-device-transfer` of `ways`: from the first token to the second, which holds the
    hand-over and a decode step; the floor is a copy of the prompt's KV on the card. Wrong is what differs from the
    tokens of the first way that worked."""
    right: list[list[tuple[int, ...]]] = []
    for way in ways:
        served: list[_Served] = []
        start = f"1P+1D {load.shape} {way}: tokens"
        yield Task(start, partial(_serve, start, served, right, directory, way, load, seed))
        for one in served:
            for length, seconds in zip(load.prompts, one.hand_overs, strict=True):
                name = f"1P+1D {load.shape} {way}, second token of {length}"
                floor = rates.floor_seconds(2 * length * _kv_bytes(load.shape), 0)
                yield Task(name, partial(Result, name, 0.0, seconds, floor))


def _kv_bytes(shape: str) -> int:
    """Of one token, in bfloat16."""
    config = SHAPES[shape]()
    head_dim = config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2)


@dataclass(frozen=True, slots=True)
class _Served:
    """By prompt: seconds between the first and the second token, and all tokens. `seconds`: of all."""

    seconds: float
    hand_overs: list[float]
    tokens: list[tuple[int, ...]]


def _serve(
    name: str,
    served: list[_Served],
    right: list[list[tuple[int, ...]]],
    directory: Path,
    way: str,
    load: ClusterLoad,
    seed: int,
) -> Result:
    """Seconds: of all requests."""
    model = directory / "model"
    if not model.exists():
        write_random_model(model, load.shape, seed=seed % 2**31)
    with _cluster(model, way, load) as address:
        found = asyncio.run(_ask(address.grpc, load, seed))
    served.append(found)
    right.append(found.tokens)
    return Result(name, 0.0 if found.tokens == right[0] else float("inf"), found.seconds, 0.0)


def _cluster(model: Path, way: str, load: ClusterLoad) -> AbstractContextManager[ClusterAddress]:
    options = ["--prefill-nodes", "1", "--decode-nodes", "1", "--device", load.device]
    if load.device == "cuda":
        options += ["--kv-device-transfer", way]
    # Nothing is prefilled on the decode node, so that all KV moves.
    options += ["--local-prefill-max-tokens", "0", "--log-level", "info"]
    return local_cluster(str(model), options)


async def _ask(address: str, load: ClusterLoad, seed: int) -> _Served:
    client = GrpcClient(address, Generation(temperature=0.0, ignore_eos=True, timeout=120.0), MonotonicClock())
    try:
        await client.resolve_model("")
        draw = random.Random(seed)
        vocab_size = SHAPES[load.shape]().vocab_size
        hand_overs, tokens = [], []
        started = time.perf_counter()
        for length in (load.prompts[0], *load.prompts):  # the first one warms up
            prompt = tuple(draw.randrange(_FIRST_ID, vocab_size) for _ in range(length))
            answer = Answer()
            await client.generate(prompt, load.new, answer)
            if answer.failure is not None or len(answer.arrivals) < 2 or len(answer.token_ids) != load.new:
                raise RuntimeError(f"a request over 1P+1D failed: {answer.failure}")
            hand_overs.append(answer.arrivals[1] - answer.arrivals[0])
            tokens.append(answer.token_ids)
        return _Served(time.perf_counter() - started, hand_overs[1:], tokens)
    finally:
        await client.close()
