"""KV between two processes whose pools are in the memory of the same GPU, compared with a copy on that GPU."""

import asyncio
import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bench.connectors import Place, between_processes
from bench.gpu.measure import Rates
from bench.gpu.report import Result
from bench.gpu.task import Task


def transfer_tasks(device: torch.device, rates: Rates, sizes: Sequence[str], megabytes: int) -> Iterator[Task]:
    """Yields fetches of `megabytes`, with digests, for each of `sizes` (keys of BLOCK_SIZES) and each way that KV can
    go."""
    backends = ["shared_memory"]
    if device.type == "cuda" and importlib.util.find_spec("ucxx") is not None:
        backends.append("ucx")
    for size in sizes:
        for backend in backends:
            for directly in (True, False) if device.type == "cuda" else (False,):
                place = Place(size, megabytes, device, directly)
                label = f"KV of {size} over {place.way(backend)}"
                yield Task(label, partial(_transfer, label, backend, place, rates))


def _transfer(label: str, backend: str, place: Place, rates: Rates) -> Result:
    moved = asyncio.run(between_processes(backend, place))
    num_bytes = place.count * place.layout.block_bytes
    error = 0.0 if moved.is_right else float("inf")
    return Result(label, error, num_bytes / moved.rate, rates.floor_seconds(2 * num_bytes, 0))
