"""KV between two processes, from one card's memory to the same card's: which way it went, against a copy on the card.
Then a prefill and a decode node on it, whose tokens have to be the same whichever way their KV goes.
"""

import asyncio
import importlib.util
import logging
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.connectors import BLOCK_SIZES, Place, between_processes
from bench.gpu.measure import Rates
from bench.gpu.report import Result
from bench.random_model import SHAPES, write_random_model
from kvrelay.bench.base import Answer, Generation
from kvrelay.bench.grpc_client import GrpcClient
from kvrelay.cli.local_cluster import local_cluster
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.errors import KVRelayError, UnavailableError

_logger = logging.getLogger(__name__)
_FIRST_ID = 300  # behind bytes and special tokens


def transfer_cases(device: torch.device, rates: Rates, sizes: Sequence[str], megabytes: int) -> Iterator[Result]:
    """A fetch of `megabytes` in blocks of each of `sizes`, digests and all. What does not work on this machine is
    logged and left out."""
    backends = ["shared_memory"]
    if device.type == "cuda" and importlib.util.find_spec("ucxx") is not None:
        backends.append("ucx")
    for name in sizes:
        layout = BLOCK_SIZES[name]
        for backend in backends:
            for directly in (True, False) if device.type == "cuda" else (False,):
                place = Place(layout, (megabytes << 20) // layout.block_bytes, device, directly)
                label = f"KV of {name} over {place.way(backend)}"
                try:
                    moved = asyncio.run(between_processes(backend, name, place, megabytes))
                except KVRelayError as error:
                    _logger.warning("%s does not work here: %s", label, error)
                    continue
                num_bytes = place.count * layout.block_bytes
                error_share = 0.0 if moved.is_right else float("inf")
                yield Result(label, error_share, num_bytes / moved.rate, rates.floor_seconds(2 * num_bytes, 0), {})
                _logger.info("%s: %.2f GB/s", label, moved.rate / 1e9)


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """One request at a time: `prompts`, tokens each; `new` tokens are made of each. `device` as the nodes' setting."""

    device: str
    shape: str
    prompts: tuple[int, ...]
    new: int


def cluster_cases(load: ClusterLoad, ways: Sequence[str], rates: Rates, seed: int) -> Iterator[Result]:
    """1P+1D on the card, for each `--kv-device-transfer` of `ways`: from the first token to the second, which holds the
    hand-over and a decode step; the floor is a copy of the prompt's KV on the card. Wrong is what differs from the
    tokens of the last way that works."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_random_model(Path(directory) / "model", load.shape, seed=seed % 2**31)
        found = [(way, measured) for way in ways if (measured := _serve(model, way, load, seed)) is not None]
    for way, measured in found:
        error = 0.0 if measured.tokens == found[-1][1].tokens else float("inf")
        for length, seconds in zip(load.prompts, measured.hand_overs, strict=True):
            floor = rates.floor_seconds(2 * length * _kv_bytes(load.shape), 0)
            yield Result(f"1P+1D {load.shape} {way}, second token of {length}", error, seconds, floor, {})


def _kv_bytes(shape: str) -> int:
    """Of one token, in bfloat16."""
    config = SHAPES[shape]()
    head_dim = config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2)


@dataclass(frozen=True, slots=True)
class _Served:
    """By prompt: seconds between the first and the second token, and all tokens."""

    hand_overs: list[float]
    tokens: list[tuple[int, ...]]


def _serve(model: Path, way: str, load: ClusterLoad, seed: int) -> _Served | None:
    options = ["--prefill-nodes", "1", "--decode-nodes", "1", "--device", load.device, "--kv-device-transfer", way]
    # Nothing is prefilled on the decode node, so that all KV moves.
    options += ["--local-prefill-max-tokens", "0", "--log-level", "info"]
    try:
        with local_cluster(str(model), options) as address:
            return asyncio.run(_ask(address.grpc, load, seed))
    except UnavailableError as error:
        _logger.warning("1P+1D with --kv-device-transfer %s does not work here: %s", way, error)
        return None


async def _ask(address: str, load: ClusterLoad, seed: int) -> _Served:
    client = GrpcClient(address, Generation(temperature=0.0, ignore_eos=True, timeout=120.0), MonotonicClock())
    try:
        await client.resolve_model("")
        draw = random.Random(seed)
        vocab_size = SHAPES[load.shape]().vocab_size
        served = _Served([], [])
        for length in (load.prompts[0], *load.prompts):  # the first one warms up
            prompt = tuple(draw.randrange(_FIRST_ID, vocab_size) for _ in range(length))
            answer = Answer()
            await client.generate(prompt, load.new, answer)
            if answer.failure is not None or len(answer.arrivals) < 2 or len(answer.token_ids) != load.new:
                raise RuntimeError(f"a request over 1P+1D failed: {answer.failure}")
            served.hand_overs.append(answer.arrivals[1] - answer.arrivals[0])
            served.tokens.append(answer.token_ids)
        return _Served(served.hand_overs[1:], served.tokens)
    finally:
        await client.close()
