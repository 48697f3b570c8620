"""Speed of `fetch` between two processes, in turn with a yardstick in the same run: shared memory against a plain copy,
UCX (where ucxx is installed) against bare ucxx send/recv. Redis on request.

    python -m bench.connectors [--megabytes 256] [--redis-url redis://127.0.0.1:6379/0] [--device cuda]

A fetch digests every block, which the yardsticks do not. The best of several rounds counts, so page faults of the first
one do not. Every byte that has arrived is compared; the exit status is 1 when one is wrong. With `--device cuda` both
pools are in the memory of a card, and blocks pass through pinned host memory.
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
from dataclasses import dataclass

import numpy as np
import torch

from kv_connector.base import Block, FetchResult, KVConnector, Source
from kv_connector.registry import create_connector
from kv_connector.settings import ConnectorSettings, RedisSettings, SharedMemorySettings, UcxSettings
from kvrelay.core.block_hash import BlockHash
from kvrelay.core.kv_layout import KVLayout
from kvrelay.node.block_copy import choose_copy
from kvrelay.node.pool import NodePool, PoolPlan, make_pool

_BLOCK_SIZES = {
    "128 KiB": KVLayout(num_kv_heads=2, num_layers=16, block_size=16, head_dim=64, dtype="bfloat16"),
    "2 MiB": KVLayout(num_kv_heads=8, num_layers=32, block_size=16, head_dim=128, dtype="bfloat16"),
}
_EPOCH = 1
_ROUNDS = 4
_TURNS = 5  # of ucx and its yardstick
_SETTINGS = ConnectorSettings(
    shared_memory=SharedMemorySettings(copy=choose_copy()), ucx=UcxSettings("nothing of value is moved")
)


def named_blocks(count: int) -> list[Block]:
    return [Block(i, BlockHash(hashlib.sha256(b"bench %d" % i).digest()), 16) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where pools lie and what is in them."""

    layout: KVLayout
    count: int
    device: torch.device

    def pool(self, backend: str, node_id: str, settings: ConnectorSettings = _SETTINGS) -> NodePool:
        staging_bytes = 2 * self.count * self.layout.block_bytes
        plan = PoolPlan(self.layout, self.count, staging_bytes, node_id, _EPOCH)
        return make_pool(create_connector(backend, settings), plan, self.device)

    def content(self) -> torch.Tensor:
        """`[count, block_bytes]`: no two blocks are alike, nor two neighbouring bytes."""
        offsets = torch.arange(self.layout.block_bytes, dtype=torch.int32)
        blocks = torch.arange(self.count, dtype=torch.int32)
        return torch.stack([((offsets * 7 + block * 31) % 251).to(torch.uint8) for block in blocks])

    def rows(self, pool: NodePool) -> torch.Tensor:
        return pool.tensor.view(torch.uint8).view(self.count, -1)


async def own(backend: str, place: Place) -> None:
    """The other process: publishes, prints the endpoint, and stays until stdin ends."""
    pool = place.pool(backend, "bench-owner")
    place.rows(pool).copy_(place.content())
    _finish(place.device)
    await pool.connector.publish(named_blocks(place.count))
    print(pool.connector.endpoint, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await pool.connector.close()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def fetch_rate(connector: KVConnector, source: Source | None, blocks: Sequence[Block], block_bytes: int) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        result: FetchResult = await connector.fetch(source, blocks, timeout=60)
        best = min(best, time.perf_counter() - started)
        assert result.num_leading_fetched == len(blocks)
    return len(blocks) * block_bytes / best / 1e9


def copy_rate(count: int, block_bytes: int) -> float:
    source, destination = np.ones((count, block_bytes), np.uint8), np.ones((count, block_bytes), np.uint8)
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for row, target in zip(source, destination, strict=True):
            np.copyto(target, row)
        best = min(best, time.perf_counter() - started)
    return count * block_bytes / best / 1e9


async def between_processes(backend: str, name: str, place: Place, megabytes: int) -> float:
    """GB/s. Exits with status 1 when a byte is wrong."""
    command = [sys.executable, "-m", "bench.connectors", "--own", name, "--backend", backend]
    command += ["--megabytes", str(megabytes), "--device", place.device.type]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None and process.stdin is not None
        endpoint = process.stdout.readline().strip()
        pool = place.pool(backend, "bench-peer")
        source = Source("bench-owner", _EPOCH, endpoint)
        rate = await fetch_rate(pool.connector, source, named_blocks(place.count), place.layout.block_bytes)
        is_right = torch.equal(place.rows(pool).cpu(), place.content())
        await pool.connector.close()
        process.stdin.close()
    if not is_right:
        sys.exit(f"{backend} on {place.device}: wrong bytes arrived")
    return rate


async def shared_memory(name: str, place: Place, megabytes: int) -> None:
    rate = await between_processes("shared_memory", name, place, megabytes)
    plain = copy_rate(place.count, place.layout.block_bytes)
    print(f"shared_memory {name:>8}: {rate:6.2f} GB/s, plain copy {plain:6.2f} GB/s, ratio {rate / plain:.2f}")


async def ucx(name: str, place: Place, megabytes: int) -> None:
    from bench.bare_ucxx import bare_rate

    ratios: list[float] = []
    for _ in range(_TURNS):
        bare = bare_rate(place.layout.block_bytes, place.count, _ROUNDS)
        rate = await between_processes("ucx", name, place, megabytes)
        ratios.append(rate / bare)
        print(f"ucx           {name:>8}: {rate:6.2f} GB/s, bare ucxx  {bare:6.2f} GB/s, ratio {rate / bare:.2f}")
    print(f"ucx           {name:>8}: median ratio {statistics.median(ratios):.2f}")


async def redis(name: str, place: Place, url: str) -> None:
    prefix = f"bench-{place.layout.block_bytes}"
    settings = ConnectorSettings(redis=RedisSettings(url=url, key_prefix=prefix, ttl_seconds=60))
    pool = place.pool("redis", "bench", settings)
    await pool.connector.publish(named_blocks(place.count))
    rate = await fetch_rate(pool.connector, None, named_blocks(place.count), place.layout.block_bytes)
    await pool.connector.close()
    print(f"redis         {name:>8}: {rate:6.2f} GB/s")


async def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of KV block transfers on this machine.")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the pools")
    parser.add_argument("--redis-url", help="also measure this Redis")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the pools are")
    parser.add_argument("--backend", default="shared_memory", help=argparse.SUPPRESS)
    parser.add_argument("--own", choices=_BLOCK_SIZES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no card that torch can use: --device cuda has to run where there is one")
    device = torch.device(arguments.device)
    places = {
        name: Place(layout, (arguments.megabytes << 20) // layout.block_bytes, device)
        for name, layout in _BLOCK_SIZES.items()
    }
    if arguments.own:
        await own(arguments.backend, places[arguments.own])
        return
    for name, place in places.items():
        await shared_memory(name, place, arguments.megabytes)
        if importlib.util.find_spec("ucxx") is not None:
            await ucx(name, place, arguments.megabytes)
        if arguments.redis_url:
            await redis(name, place, arguments.redis_url)


if __name__ == "__main__":
    asyncio.run(main())
