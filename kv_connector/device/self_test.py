"""Self-tests over device memory: whether copies to and from the host are right, and whether a connector moves blocks.

The latter needs two processes: CUDA does not let a process map what it has exported itself, and a library that moves
host memory need not move a device's. `check_direct` starts the other one, which runs `hold`: it reads one line from its
standard input (an `Order`, whose secrets must not be arguments), holds blocks, prints its endpoint, or why it cannot
hold them, and ends when its input does.
Invariant: what is compared is what is in device memory, copied to the host, not what connectors report of it.
"""

import asyncio
import hashlib
import json
import os
import secrets
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from kv_connector.base import PoolBuffer
from kv_connector.device.base import DeviceConnector
from kv_connector.device.memory import BlockCopy, DeviceMemory, DirectMemory
from kv_connector.device.pool import DevicePool
from kv_connector.registry import create_direct
from kv_connector.self_test import SCRATCH_BLOCKS, SCRATCH_LAYOUT, SelfTestReport, compare_blocks, fetch_scratch
from kv_connector.settings import ConnectorSettings
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource

MakeMemory = Callable[[KVLayout, int], DirectMemory]
"""Makes zeroed scratch memory on the device, for so many blocks."""

_COPIED_BLOCKS = 4
_START_SECONDS = 60.0  # torch, the driver, kernels that are compiled for the first time
_FETCH_SECONDS = 10.0
_READ_SECONDS = 60.0  # everything in this process: device memory, kernels that are compiled for the first time
_END_SECONDS = 10.0
# What says that blocks cannot be moved here. RuntimeError is torch's: such as a GPU that takes one process only.
_CANNOT = (ConfigurationError, KVError, RuntimeError)
# How the other process's answer begins.
_ENDPOINT = b"endpoint "
_PROBLEM = b"problem "


def check_device(memory: DeviceMemory, staging: PoolBuffer) -> SelfTestReport:
    """Copies blocks to the device and back, through `staging`, to which it is attached. Neither is in use yet; both are
    zero again afterwards. Waits for the device."""
    block_bytes = staging.layout.block_bytes
    count = min(_COPIED_BLOCKS, memory.num_blocks, staging.num_blocks // 2)
    size = count * block_bytes
    pattern = os.urandom(size)
    # Copied to the device from some slots, and back to others in another order.
    there = [BlockCopy(index, index) for index in range(count)]
    back = [BlockCopy(index, 2 * count - 1 - index) for index in range(count)]
    try:
        staging.memory[:size] = pattern
        started = time.monotonic()
        memory.from_host(there)
        memory.to_host(back)
        rate = 2 * size / (time.monotonic() - started)
        arrived = b"".join(
            bytes(staging.memory[copy.slot * block_bytes : (copy.slot + 1) * block_bytes]) for copy in back
        )
        staging.memory[: 2 * size] = bytes(2 * size)
        memory.from_host(there)
    except KVError as error:
        return SelfTestReport(str(error))
    return compare_blocks(pattern, arrived, block_bytes, rate)


@dataclass(frozen=True, slots=True)
class Order:
    """What the other process is to hold: blocks of `connector` (a name for `create_direct`) whose names and bytes
    follow from `seed`."""

    connector: str
    seed: str
    epoch: int
    settings: ConnectorSettings

    @classmethod
    def draw(cls, connector: str, settings: ConnectorSettings) -> "Order":
        """Returns an order with a random seed and epoch."""
        return cls(connector, secrets.token_hex(16), secrets.randbits(63), settings)

    def encode(self) -> bytes:
        """Returns one line of JSON without its end."""
        return json.dumps([self.connector, self.seed, self.epoch, self.settings.plain()]).encode()

    @classmethod
    def decode(cls, line: str) -> "Order":
        connector, seed, epoch, settings = json.loads(line)
        return cls(connector, seed, epoch, ConnectorSettings.from_plain(settings))

    @property
    def pattern(self) -> bytes:
        return hashlib.shake_256(self.seed.encode()).digest(SCRATCH_BLOCKS * SCRATCH_LAYOUT.block_bytes)

    @property
    def blocks(self) -> list[NamedBlock]:
        names = [hashlib.sha256(f"{self.seed} {index}".encode()).digest() for index in range(SCRATCH_BLOCKS)]
        return [NamedBlock(index, BlockHash(name), SCRATCH_LAYOUT.block_size) for index, name in enumerate(names)]


async def check_direct(
    name: str,
    settings: ConnectorSettings,
    make_memory: MakeMemory,
    *,
    probe: Sequence[str],
    start_seconds: float = _START_SECONDS,
) -> SelfTestReport:
    """Fetches blocks from another process's device memory into ours, through the connector `name` (a name for
    `create_direct`). `probe` is the command of the other process, which has to be ready after `start_seconds`. Waits
    for the device and leaves nothing behind."""
    order = Order.draw(name, settings)
    process = await asyncio.create_subprocess_exec(*probe, stdin=PIPE, stdout=PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(order.encode() + b"\n")
        async with asyncio.timeout(start_seconds):
            answer = await _answer(process)
        if not answer:
            return _unfinished("the process that was to hold blocks ended; what it logged says why")
        if answer.startswith(_PROBLEM):
            return SelfTestReport(answer.removeprefix(_PROBLEM).decode())
        endpoint = answer.removeprefix(_ENDPOINT).decode()
        # A driver that hangs cannot be cancelled: its thread is left behind.
        fetching = asyncio.create_task(_fetch(order, endpoint, make_memory), name="kv transfer probe")
        done, _ = await asyncio.wait({fetching}, timeout=_READ_SECONDS)
        if not done:
            fetching.cancel()
            return _unfinished(f"blocks were not there {_READ_SECONDS:g} s after the other process was ready")
        return fetching.result()
    except TimeoutError:
        return _unfinished(f"the process that was to hold blocks was not ready after {start_seconds:g} s")
    except _CANNOT as error:
        return SelfTestReport(_first_line(error))
    finally:
        await _end(process)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _unfinished(problem: str) -> SelfTestReport:
    return SelfTestReport(problem, is_unfinished=True)


async def hold(make_memory: MakeMemory) -> None:
    """Holds blocks until standard input ends: the whole life of the other process."""
    order = Order.decode(await asyncio.to_thread(sys.stdin.readline))
    async with AsyncExitStack() as stack:
        try:
            connector, scratch = await _open(order, make_memory, stack, "probe", order.epoch)
            await scratch.fill(order.pattern)
            await connector.publish(order.blocks)
            answer = _ENDPOINT + connector.endpoint.encode()
        except _CANNOT as error:
            answer = _PROBLEM + _first_line(error).encode()
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()
        await asyncio.to_thread(sys.stdin.read)


async def _end(process: Process) -> None:
    """Ends the other process. It cleans up after itself when its input ends, unless it hangs."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        # A process that hangs in a driver may not even die of this; nobody waits for it any longer.
        await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=_END_SECONDS)


async def _answer(process: Process) -> bytes:
    """Returns the answer that the process prints, or nothing when it ends before."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.startswith((_ENDPOINT, _PROBLEM)):  # libraries may print lines of their own
            return line.strip()
    return b""


async def _fetch(order: Order, endpoint: str, make_memory: MakeMemory) -> SelfTestReport:
    async with AsyncExitStack() as stack:
        connector, scratch = await _open(order, make_memory, stack, "reader", order.epoch ^ 1)
        source = KVSource("self-test-probe", order.epoch, endpoint)
        report = await fetch_scratch(connector, source, order.blocks, timeout=_FETCH_SECONDS)
        if report.problem:
            return report
        arrived = await scratch.content()
        return compare_blocks(order.pattern, arrived, SCRATCH_LAYOUT.block_bytes, report.bytes_per_second)


async def _open(
    order: Order, make_memory: MakeMemory, stack: AsyncExitStack, node_id: str, epoch: int
) -> "tuple[DeviceConnector, _Scratch]":
    memory = make_memory(SCRATCH_LAYOUT, SCRATCH_BLOCKS)
    pool = DevicePool(memory, SCRATCH_LAYOUT)
    stack.callback(pool.stop)
    scratch = _Scratch(pool)
    stack.push_async_callback(pool.run, memory.detach)
    await pool.run(memory.attach, scratch.host)
    connector = create_direct(order.connector, order.settings)
    stack.push_async_callback(connector.close)
    connector.serve(pool, node_id=f"self-test-{node_id}", epoch=epoch)
    return connector, scratch


class _Scratch:
    """A pool on the device and, in `host`, a copy of all of it."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._bytes = bytearray(SCRATCH_BLOCKS * SCRATCH_LAYOUT.block_bytes)
        self.host = PoolBuffer(memoryview(self._bytes), SCRATCH_LAYOUT, SCRATCH_BLOCKS)
        self._all = [BlockCopy(index, index) for index in range(SCRATCH_BLOCKS)]

    async def fill(self, content: bytes) -> None:
        self.host.memory[:] = content
        await self._pool.run(self._pool.memory.from_host, self._all)

    async def content(self) -> bytes:
        await self._pool.run(self._pool.memory.to_host, self._all)
        return bytes(self._bytes)
