"""Speed of `fetch` between two processes, in turn with a yardstick in the same run: shared memory against a plain copy,
UCX (where ucxx is installed) against bare ucxx send/recv. Redis on request.

    python -m bench.connectors [--megabytes 256] [--redis-url redis://127.0.0.1:6379/0] [--device cuda]

A fetch digests every block, which the yardsticks do not. The best of several rounds counts, so page faults of the first
one do not. Every byte that has arrived is compared; the exit status is 1 when one is wrong. With `--device cuda` both
pools are in the memory of a card, and blocks go from one to the other and then once more through pinned host memory;
the yardstick is a copy on the card.
"""

import argparse
import asyncio
import hashlib
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO

import numpy as np
import torch

from kv_connector.base import FetchOutcome, FetchResult, KVConnector
from kv_connector.registry import create_connector, create_direct, direct_name
from kv_connector.settings import ConnectorSettings, RedisSettings, UcxSettings
from kv_connector.tiered import TieredConnector
from kv_connector.ucx.environment import prepare_ucx_environment
from kvrelay.core.block_hash import BlockHash
from kvrelay.core.errors import UnavailableError
from kvrelay.core.kv_layout import KVLayout
from kvrelay.core.kv_source import KVSource
from kvrelay.core.named_block import NamedBlock
from kvrelay.node.block_copy import choose_copy
from kvrelay.node.pool import NodePool, PoolPlan, make_direct_pool, make_pool

BLOCK_SIZES = {
    "128 KiB": KVLayout(num_kv_heads=2, num_layers=16, block_size=16, head_dim=64, dtype="bfloat16"),
    "2 MiB": KVLayout(num_kv_heads=8, num_layers=32, block_size=16, head_dim=128, dtype="bfloat16"),
}
_EPOCH = 1
_ANSWER = "endpoint "
_ROUNDS = 4
_TURNS = 5  # of ucx and its yardstick
_SETTINGS = ConnectorSettings(ucx=UcxSettings("nothing of value is moved"), copy=choose_copy())


def named_blocks(count: int) -> list[NamedBlock]:
    return [NamedBlock(i, BlockHash(hashlib.sha256(b"bench %d" % i).digest()), 16) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where pools lie and what is in them. `directly`: on a card, blocks do not pass through the host."""

    layout: KVLayout
    count: int
    device: torch.device
    directly: bool = False

    def pool(self, backend: str, node_id: str, settings: ConnectorSettings = _SETTINGS) -> NodePool:
        staging_bytes = 2 * self.count * self.layout.block_bytes
        plan = PoolPlan(self.layout, self.count, staging_bytes, node_id, _EPOCH)
        if self.directly:
            direct = direct_name(backend)
            assert direct is not None
            return make_direct_pool(TieredConnector([create_direct(direct, settings)]), plan, self.device)
        return make_pool(create_connector(backend, settings), plan, self.device)

    def way(self, backend: str) -> str:
        """What a person calls it."""
        if self.device.type == "cpu":
            return backend
        return f"{direct_name(backend)} directly" if self.directly else f"{backend} staged"

    def content(self) -> torch.Tensor:
        """`[count, block_bytes]`: no two blocks are alike, nor two neighbouring bytes."""
        offsets = torch.arange(self.layout.block_bytes, dtype=torch.int32)
        blocks = torch.arange(self.count, dtype=torch.int32)
        return torch.stack([((offsets * 7 + block * 31) % 251).to(torch.uint8) for block in blocks])

    def rows(self, pool: NodePool) -> torch.Tensor:
        return pool.tensor.view(torch.uint8).view(self.count, -1)


async def own(backend: str, place: Place) -> None:
    """The other process: publishes, says its endpoint, and stays until stdin ends."""
    pool = place.pool(backend, "bench-owner")
    place.rows(pool).copy_(place.content())
    _finish(place.device)
    await pool.connector.publish(named_blocks(place.count))
    print(f"{_ANSWER}{pool.connector.endpoint}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await pool.connector.close()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def fetch_rate(
    connector: KVConnector, source: KVSource | None, blocks: Sequence[NamedBlock], block_bytes: int
) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        result: FetchResult = await connector.fetch(source, blocks, timeout=60)
        best = min(best, time.perf_counter() - started)
        arrived = result.outcomes.count(FetchOutcome.FETCHED)
        if arrived != len(blocks):
            raise UnavailableError(f"only {arrived} of {len(blocks)} blocks arrived")
    return len(blocks) * block_bytes / best


def copy_rate(place: Place) -> float:
    """Bytes a second, block by block, where the pools are."""
    count, block_bytes = place.count, place.layout.block_bytes
    if place.device.type == "cuda":
        return _copy_rate_on(place)
    source, destination = np.ones((count, block_bytes), np.uint8), np.ones((count, block_bytes), np.uint8)
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for row, target in zip(source, destination, strict=True):
            np.copyto(target, row)
        best = min(best, time.perf_counter() - started)
    return count * block_bytes / best


def _copy_rate_on(place: Place) -> float:
    source = place.content().to(place.device)
    destination = torch.empty_like(source)
    best = float("inf")
    for _ in range(_ROUNDS):
        _finish(place.device)
        started = time.perf_counter()
        for row, target in zip(source, destination, strict=True):
            target.copy_(row)
        _finish(place.device)
        best = min(best, time.perf_counter() - started)
    return source.numel() / best


@dataclass(frozen=True, slots=True)
class Moved:
    """`rate`: bytes a second. `is_right`: every byte arrived as it was."""

    rate: float
    is_right: bool


async def between_processes(backend: str, name: str, place: Place, megabytes: int) -> Moved:
    """`name`: of the size of blocks. Raises KVRelayError when that does not work here."""
    command = [sys.executable, "-m", "bench.connectors", "--own", name, "--backend", backend]
    command += ["--megabytes", str(megabytes), "--device", place.device.type]
    command += ["--directly"] if place.directly else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None and process.stdin is not None
        try:
            endpoint = _endpoint(process.stdout)
            pool = place.pool(backend, "bench-peer")
            try:
                source = KVSource("bench-owner", _EPOCH, endpoint)
                rate = await fetch_rate(pool.connector, source, named_blocks(place.count), place.layout.block_bytes)
                is_right = torch.equal(place.rows(pool).cpu(), place.content())
            finally:
                await pool.connector.close()
        finally:
            process.stdin.close()
    return Moved(rate, is_right)


def _endpoint(lines: IO[str]) -> str:
    """Libraries may have something to say before."""
    for line in lines:
        if line.startswith(_ANSWER):
            return line.removeprefix(_ANSWER).strip()
    raise UnavailableError("the process that was to hold blocks ended; its messages are above")


async def moved_rate(backend: str, name: str, place: Place, megabytes: int) -> float:
    """Bytes a second. Exits with status 1 when a byte is wrong."""
    moved = await between_processes(backend, name, place, megabytes)
    if not moved.is_right:
        sys.exit(f"{place.way(backend)} on {place.device}: wrong bytes arrived")
    return moved.rate


def show(label: str, name: str, rate: float, yardstick: str, reached: float) -> None:
    rates = f"{rate / 1e9:6.2f} GB/s, {yardstick} {reached / 1e9:6.2f} GB/s"
    print(f"{label:13} {name:>8}: {rates}, ratio {rate / reached:.2f}")


async def against_a_copy(backend: str, name: str, place: Place, megabytes: int) -> None:
    show(place.way(backend), name, await moved_rate(backend, name, place, megabytes), "plain copy", copy_rate(place))


async def ucx(name: str, place: Place, megabytes: int) -> None:
    prepare_ucx_environment()
    from bench.bare_ucxx import bare_rate

    ratios: list[float] = []
    for _ in range(_TURNS):
        bare = 1e9 * bare_rate(place.layout.block_bytes, place.count, _ROUNDS)
        rate = await moved_rate("ucx", name, place, megabytes)
        ratios.append(rate / bare)
        show("ucx", name, rate, "bare ucxx ", bare)
    print(f"ucx           {name:>8}: median ratio {statistics.median(ratios):.2f}")


async def redis(name: str, place: Place, url: str) -> None:
    prefix = f"bench-{place.layout.block_bytes}"
    settings = ConnectorSettings(redis=RedisSettings(url=url, key_prefix=prefix, ttl_seconds=60))
    pool = place.pool("redis", "bench", settings)
    await pool.connector.publish(named_blocks(place.count))
    rate = await fetch_rate(pool.connector, None, named_blocks(place.count), place.layout.block_bytes)
    await pool.connector.close()
    print(f"redis         {name:>8}: {rate / 1e9:6.2f} GB/s")


async def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of KV block transfers on this machine.")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the pools")
    parser.add_argument("--redis-url", help="also measure this Redis")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the pools are")
    parser.add_argument("--backend", default="shared_memory", help=argparse.SUPPRESS)
    parser.add_argument("--directly", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--own", choices=BLOCK_SIZES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no card that torch can use: --device cuda has to run where there is one")
    device = torch.device(arguments.device)
    places = {
        name: Place(layout, (arguments.megabytes << 20) // layout.block_bytes, device, arguments.directly)
        for name, layout in BLOCK_SIZES.items()
    }
    if arguments.own:
        await own(arguments.backend, places[arguments.own])
        return
    for name, place in places.items():
        has_ucx = importlib.util.find_spec("ucxx") is not None
        if device.type == "cuda":
            for backend in ("shared_memory", "ucx") if has_ucx else ("shared_memory",):
                for directly in (True, False):
                    await against_a_copy(backend, name, replace(place, directly=directly), arguments.megabytes)
        else:
            await against_a_copy("shared_memory", name, place, arguments.megabytes)
            if has_ucx:
                await ucx(name, place, arguments.megabytes)
        if arguments.redis_url:
            await redis(name, place, arguments.redis_url)


if __name__ == "__main__":
    asyncio.run(main())
