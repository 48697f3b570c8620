"""Speed of `fetch` between two processes, in turn with a yardstick in the same run: shared memory against a plain copy,
UCX (where ucxx is installed) against bare ucxx send/recv. Redis on request.

    python -m bench.connectors [--megabytes 256] [--redis-url redis://127.0.0.1:6379/0]

A fetch digests every block, which the yardsticks do not. The best of several rounds counts, so page
faults of the first one do not.
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

import numpy as np

from kv_connector.base import Block, HostConnector, KVConnector, Source
from kv_connector.registry import create_connector
from kv_connector.settings import ConnectorSettings, RedisSettings, UcxSettings
from kvrelay.core.block_hash import BlockHash
from kvrelay.core.kv_layout import KVLayout

_BLOCK_SIZES = {
    "128 KiB": KVLayout(num_kv_heads=2, num_layers=16, block_size=16, head_dim=64, dtype="bfloat16"),
    "2 MiB": KVLayout(num_kv_heads=8, num_layers=32, block_size=16, head_dim=128, dtype="bfloat16"),
}
_EPOCH = 1
_ROUNDS = 4
_TURNS = 5  # of ucx and its yardstick
_SETTINGS = ConnectorSettings(ucx=UcxSettings("nothing of value is moved"))


def named_blocks(count: int) -> list[Block]:
    return [Block(i, BlockHash(hashlib.sha256(b"bench %d" % i).digest()), 16) for i in range(count)]


async def own(backend: str, layout: KVLayout, count: int) -> None:
    """The other process: publishes, prints the endpoint, and stays until stdin ends."""
    connector = create_connector(backend, _SETTINGS)
    pool = connector.allocate(layout, count, node_id="bench-owner", epoch=_EPOCH)
    np.frombuffer(pool.memory, np.uint8)[:] = 7
    await connector.publish(named_blocks(count))
    print(connector.endpoint, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await connector.close()


async def fetch_rate(
    connector: HostConnector, source: Source | None, blocks: Sequence[Block], block_bytes: int
) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        result = await connector.fetch(source, blocks, timeout=60)
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


async def between_processes(backend: str, name: str, layout: KVLayout, count: int, megabytes: int) -> float:
    """GB/s."""
    command = [sys.executable, "-m", "bench.connectors", "--own", name, "--backend", backend]
    command += ["--megabytes", str(megabytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None and process.stdin is not None
        endpoint = process.stdout.readline().strip()
        connector = create_connector(backend, _SETTINGS)
        connector.allocate(layout, count, node_id="bench-peer", epoch=_EPOCH)
        source = Source("bench-owner", _EPOCH, endpoint)
        rate = await fetch_rate(connector, source, named_blocks(count), layout.block_bytes)
        await connector.close()
        process.stdin.close()
    return rate


async def shared_memory(name: str, layout: KVLayout, count: int, megabytes: int) -> None:
    rate = await between_processes("shared_memory", name, layout, count, megabytes)
    plain = copy_rate(count, layout.block_bytes)
    print(f"shared_memory {name:>8}: {rate:6.2f} GB/s, plain copy {plain:6.2f} GB/s, ratio {rate / plain:.2f}")


async def ucx(name: str, layout: KVLayout, count: int, megabytes: int) -> None:
    from bench.bare_ucxx import bare_rate

    ratios: list[float] = []
    for _ in range(_TURNS):
        bare = bare_rate(layout.block_bytes, count, _ROUNDS)
        rate = await between_processes("ucx", name, layout, count, megabytes)
        ratios.append(rate / bare)
        print(f"ucx           {name:>8}: {rate:6.2f} GB/s, bare ucxx  {bare:6.2f} GB/s, ratio {rate / bare:.2f}")
    print(f"ucx           {name:>8}: median ratio {statistics.median(ratios):.2f}")


async def redis(name: str, layout: KVLayout, count: int, url: str) -> None:
    settings = ConnectorSettings(redis=RedisSettings(url=url, key_prefix=f"bench-{layout.block_bytes}", ttl_seconds=60))
    connector = create_connector("redis", settings)
    connector.allocate(layout, count, node_id="bench", epoch=_EPOCH)
    await connector.publish(named_blocks(count))
    rate = await fetch_rate(connector, None, named_blocks(count), layout.block_bytes)
    await connector.close()
    print(f"redis         {name:>8}: {rate:6.2f} GB/s")


async def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of KV block transfers on this machine.")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the pools")
    parser.add_argument("--redis-url", help="also measure this Redis")
    parser.add_argument("--backend", default="shared_memory", help=argparse.SUPPRESS)
    parser.add_argument("--own", choices=_BLOCK_SIZES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own:
        layout = _BLOCK_SIZES[arguments.own]
        await own(arguments.backend, layout, (arguments.megabytes << 20) // layout.block_bytes)
        return
    for name, layout in _BLOCK_SIZES.items():
        count = (arguments.megabytes << 20) // layout.block_bytes
        await shared_memory(name, layout, count, arguments.megabytes)
        if importlib.util.find_spec("ucxx") is not None:
            await ucx(name, layout, count, arguments.megabytes)
        if arguments.redis_url:
            await redis(name, layout, count, arguments.redis_url)


if __name__ == "__main__":
    asyncio.run(main())
