"""Speed of `fetch` between two processes, in turn with a yardstick in the same run: shared memory against a plain copy,
UCX (where ucxx is installed) against bare ucxx send and receive. Redis on request, without a yardstick.

    python -m bench.connectors [--megabytes 256] [--redis-url redis://127.0.0.1:6379/0] [--device cuda]

A fetch digests every block, which the yardsticks do not. In every turn the fastest of several rounds counts, so that
the page faults of the first one do not; ratios are medians over the turns. Every byte that has arrived is compared; the
exit status is 1 when one is wrong. With `--device cuda` both pools are in the memory of a GPU, and blocks go from one
to the other directly and then once more through pinned host memory; the yardstick is a copy on the GPU.
"""

import argparse
import asyncio
import hashlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bench.arguments import positive, script_parser
from bench.child import Child, child
from bench.figures import Figure, add_json_file, write_figures
from kv_connector.base import FetchOutcome, FetchOutcomes, KVConnector
from kv_connector.registry import create_connector, create_direct, direct_name
from kv_connector.settings import ConnectorSettings, RedisSettings, UcxSettings
from kv_connector.tiered import TieredConnector
from kv_connector.ucx.environment import prepare_ucx_environment
from kvrelay.core.errors import KVRelayError, UnavailableError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.node.transfers.block_copy import choose_copy
from kvrelay.node.transfers.pool import NodePool, PoolPlan, make_direct_pool, make_pool

BLOCK_SIZES = {
    "128 KiB": KVLayout(num_kv_heads=2, num_layers=16, block_size=16, head_dim=64, dtype="bfloat16"),
    "2 MiB": KVLayout(num_kv_heads=8, num_layers=32, block_size=16, head_dim=128, dtype="bfloat16"),
}
_EPOCH = 1
_ANSWER = "endpoint "
_ROUNDS = 4
_SETTINGS = ConnectorSettings(ucx=UcxSettings("nothing of value is moved"), copy=choose_copy())


def named_blocks(count: int) -> list[NamedBlock]:
    return [NamedBlock(i, BlockHash(hashlib.sha256(b"bench %d" % i).digest()), 16) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where pools lie and what is in them: `megabytes` of blocks of a `size` in BLOCK_SIZES. With `directly`, the
    blocks of a GPU do not pass through the host."""

    size: str
    megabytes: int
    device: torch.device
    directly: bool = False

    @property
    def layout(self) -> KVLayout:
        return BLOCK_SIZES[self.size]

    @property
    def count(self) -> int:
        return (self.megabytes << 20) // self.layout.block_bytes

    def pool(self, backend: str, node_id: str, settings: ConnectorSettings = _SETTINGS) -> NodePool:
        """Returns the pool of a node whose name is that of no other process's, which may measure at the same time."""
        staging_bytes = 2 * self.count * self.layout.block_bytes
        plan = PoolPlan(self.layout, self.count, staging_bytes, f"{node_id}-{os.getpid()}", _EPOCH)
        if self.directly:
            direct = direct_name(backend)
            assert direct is not None
            return make_direct_pool(TieredConnector([create_direct(direct, settings)]), plan, self.device)
        return make_pool(create_connector(backend, settings), plan, self.device)

    def way(self, backend: str) -> str:
        """Returns what the output calls `backend` in this place."""
        if self.device.type == "cpu":
            return backend
        return f"{direct_name(backend)} directly" if self.directly else f"{backend} staged"

    def content(self) -> torch.Tensor:
        """Returns `[count, block_bytes]` in which no two blocks are alike, nor two neighbouring bytes."""
        offsets = torch.arange(self.layout.block_bytes, dtype=torch.int32)
        blocks = torch.arange(self.count, dtype=torch.int32)
        return torch.stack([((offsets * 7 + block * 31) % 251).to(torch.uint8) for block in blocks])

    def rows(self, pool: NodePool) -> torch.Tensor:
        return pool.tensor.view(torch.uint8).view(self.count, -1)


async def own(backend: str, place: Place) -> None:
    """Runs the process that holds the blocks: it publishes them, prints its endpoint, and stays until standard input
    ends."""
    pool = place.pool(backend, "bench-owner")
    try:
        place.rows(pool).copy_(place.content())
        _finish(place.device)
        await pool.connector.publish(named_blocks(place.count))
        print(f"{_ANSWER}{pool.connector.endpoint}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:  # also when nobody is there any more to read the endpoint
        await pool.connector.close()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def fetch_rate(
    connector: KVConnector, source: KVSource | None, blocks: Sequence[NamedBlock], block_bytes: int
) -> float:
    """Returns bytes per second of the fastest round. Raises UnavailableError when a block does not arrive."""
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        outcomes: FetchOutcomes = await connector.fetch(source, blocks, timeout=60)
        best = min(best, time.perf_counter() - started)
        arrived = outcomes.count(FetchOutcome.FETCHED)
        if arrived != len(blocks):
            raise UnavailableError(f"only {arrived} of {len(blocks)} blocks arrived")
    return len(blocks) * block_bytes / best


def copy_rate(place: Place) -> float:
    """Returns bytes per second of a copy, block by block, in the memory where the pools are."""
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
    """The result of moving blocks. `rate` is in bytes per second. `is_right`: every byte arrived as it was."""

    rate: float
    is_right: bool


async def between_processes(backend: str, place: Place) -> Moved:
    """Fetches a pool from a new process. Raises KVRelayError when that does not work here."""
    arguments = ["-m", "bench.connectors", "--own", place.size, "--backend", backend]
    arguments += ["--megabytes", str(place.megabytes), "--device", place.device.type]
    arguments += ["--directly"] if place.directly else []
    with child("the process that holds the blocks", arguments) as owner:
        endpoint = _endpoint(owner)
        pool = place.pool(backend, "bench-peer")
        try:
            source = KVSource("bench-owner", _EPOCH, endpoint)
            rate = await fetch_rate(pool.connector, source, named_blocks(place.count), place.layout.block_bytes)
            is_right = torch.equal(place.rows(pool).cpu(), place.content())
        finally:
            await pool.connector.close()
    return Moved(rate, is_right)


def _endpoint(owner: Child) -> str:
    """Returns the endpoint that the process prints; libraries may print something before."""
    while not (line := owner.read_line()).startswith(_ANSWER):
        pass
    return line.removeprefix(_ANSWER).strip()


async def moved_rate(backend: str, place: Place) -> float:
    """Returns bytes per second. Ends this process with status 1 when a byte is wrong."""
    moved = await between_processes(backend, place)
    if not moved.is_right:
        sys.exit(f"{place.way(backend)} on {place.device}: wrong bytes arrived")
    return moved.rate


@dataclass(frozen=True, slots=True)
class Yardstick:
    """A rate to compare with. `rate` measures it once, in bytes per second."""

    name: str
    rate: Callable[[], float]


async def in_turn(backend: str, place: Place, turns: int, yardstick: Yardstick) -> Figure:
    """Measures the yardstick and `backend` alternately, prints both rates of every turn and the median ratio, and
    returns the latter."""
    label = f"{place.way(backend):13} {place.size:>8}"
    ratios: list[float] = []
    for _ in range(turns):
        reached = yardstick.rate()
        rate = await moved_rate(backend, place)
        ratios.append(rate / reached)
        rates = f"{rate / 1e9:6.2f} GB/s, {yardstick.name} {reached / 1e9:6.2f} GB/s"
        print(f"{label}: {rates}, ratio {ratios[-1]:.2f}", flush=True)
    ratio = statistics.median(ratios)
    print(
        f"{label}: median ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {turns} turns)",
        flush=True,
    )
    return Figure(f"{place.way(backend)}, {place.size}: of {yardstick.name.strip()}", ratio)


def plain_copy(place: Place) -> Yardstick:
    return Yardstick("plain copy", lambda: copy_rate(place))


def bare_ucxx(place: Place) -> Yardstick:
    from bench.bare_ucxx import bare_rate

    prepare_ucx_environment()  # for its processes, too
    return Yardstick("bare ucxx ", lambda: bare_rate(place.layout.block_bytes, place.count, _ROUNDS))


async def redis(place: Place, url: str) -> Figure:
    """Prints and returns the rate. Ends this process with status 1 when a byte is wrong."""
    prefix = f"bench-{place.layout.block_bytes}"
    settings = ConnectorSettings(redis=RedisSettings(url=url, key_prefix=prefix, ttl_seconds=60))
    pool = place.pool("redis", "bench", settings)
    try:
        rows = place.rows(pool)
        rows.copy_(place.content())
        await pool.connector.publish(named_blocks(place.count))
        rows.zero_()  # what is there later has come from Redis
        rate = await fetch_rate(pool.connector, None, named_blocks(place.count), place.layout.block_bytes)
        is_right = torch.equal(rows.cpu(), place.content())
    finally:
        await pool.connector.close()
    if not is_right:
        sys.exit(f"redis on {place.device}: wrong bytes arrived")
    print(f"redis         {place.size:>8}: {rate / 1e9:6.2f} GB/s")
    return Figure(f"redis, {place.size}", rate / 1e9, "GB/s")


async def measure(place: Place, turns: int, redis_url: str | None) -> list[Figure]:
    """Measures every connector that works on this machine with blocks of one size."""
    figures: list[Figure] = []
    has_ucx = importlib.util.find_spec("ucxx") is not None
    if place.device.type == "cuda":
        for backend in ("shared_memory", "ucx") if has_ucx else ("shared_memory",):
            for directly in (True, False):
                there = replace(place, directly=directly)
                figures.append(await in_turn(backend, there, turns, plain_copy(there)))
    else:
        figures.append(await in_turn("shared_memory", place, turns, plain_copy(place)))
        if has_ucx:
            figures.append(await in_turn("ucx", place, turns, bare_ucxx(place)))
    if redis_url:
        figures.append(await redis(place, redis_url))
    return figures


async def run(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="size of each pool; at least 2")
    parser.add_argument("--sizes", nargs="+", choices=BLOCK_SIZES, default=list(BLOCK_SIZES), help="sizes of a block")
    parser.add_argument("--turns", type=positive, default=5, help="alternations of yardstick and fetch")
    parser.add_argument("--redis-url", help="also measure this Redis")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the pools are")
    parser.add_argument("--backend", default="shared_memory", help=argparse.SUPPRESS)
    parser.add_argument("--directly", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--own", choices=BLOCK_SIZES, help=argparse.SUPPRESS)
    add_json_file(parser)
    arguments = parser.parse_args(argv)
    if arguments.megabytes < 2:
        parser.error("--megabytes: a pool needs at least 2, the size of one large block")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU that torch can use")
    device = torch.device(arguments.device)
    if arguments.own:
        await own(arguments.backend, Place(arguments.own, arguments.megabytes, device, arguments.directly))
        return
    figures: list[Figure] = []
    for size in arguments.sizes:
        place = Place(size, arguments.megabytes, device, arguments.directly)
        figures += await measure(place, arguments.turns, arguments.redis_url)
    write_figures(arguments.json_file, figures)


def main(argv: Sequence[str] | None = None) -> None:
    try:
        asyncio.run(run(argv))
    except KVRelayError as error:
        sys.exit(f"bench.connectors: {error}")


if __name__ == "__main__":
    main()
