"""The self-test of connectors over device memory: another process holds blocks there, this one fetches and compares.

CUDA does not let a process map what it has exported itself, and a library that moves host memory need not move a
card's. The other process is `python -m kvrelay.node.transfer_probe`: it reads one line from its standard input (with
the cluster's secret, which is why it is no argument), holds blocks, says its endpoint, ends when its input does.
Invariant: what is compared is what lies in device memory, copied to the host, not what connectors say of it.
"""

import asyncio
import hashlib
import json
import secrets
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass

from kv_connector.base import FetchOutcome, PoolBuffer
from kv_connector.device.base import DeviceConnector
from kv_connector.device.memory import BlockCopy, DirectMemory
from kv_connector.device.pool import DevicePool
from kv_connector.registry import create_direct
from kv_connector.self_test import SCRATCH_BLOCKS, SCRATCH_LAYOUT, SelfTestReport, judge
from kv_connector.settings import ConnectorSettings, SharedMemorySettings, UcxSettings
from kvrelay.core.block_hash import BlockHash
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv_layout import KVLayout
from kvrelay.core.kv_source import KVSource
from kvrelay.core.named_block import NamedBlock

MakeMemory = Callable[[KVLayout, int], DirectMemory]
"""Scratch memory on the device, for so many blocks; zeroed."""

PROBE = (sys.executable, "-m", "kvrelay.node.transfer_probe")
_START_SECONDS = 60.0  # torch, the driver, kernels that are compiled for the first time
_FETCH_SECONDS = 10.0
_READ_SECONDS = 60.0  # all of it on our side: memory of the device, kernels that are compiled for the first time
_END_SECONDS = 10.0
_ANSWER = b"endpoint "


@dataclass(frozen=True, slots=True)
class Order:
    """What the other process is to hold: blocks of `connector` (by `create_direct`'s name) with the bytes of `seed`."""

    connector: str
    seed: str
    epoch: int
    directory: str | None
    secret: str
    host: str
    net_devices: str

    @classmethod
    def for_connector(cls, name: str, settings: ConnectorSettings) -> "Order":
        ucx = settings.ucx
        return cls(
            name,
            secrets.token_hex(16),
            secrets.randbits(63),
            settings.shared_memory.directory,
            ucx.cluster_secret,
            ucx.host,
            ucx.net_devices,
        )

    @property
    def settings(self) -> ConnectorSettings:
        return ConnectorSettings(
            shared_memory=SharedMemorySettings(self.directory),
            ucx=UcxSettings(self.secret, self.host, self.net_devices),
        )

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
    probe: Sequence[str] = PROBE,
    start_seconds: float = _START_SECONDS,
) -> SelfTestReport:
    """Whether the connector moves bytes from another process's device memory into ours. Waits for the device; leaves
    nothing behind. `start_seconds`: for the other process to be ready."""
    order = Order.for_connector(name, settings)
    process = await asyncio.create_subprocess_exec(*probe, stdin=PIPE, stdout=PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        async with asyncio.timeout(start_seconds):
            endpoint = await _endpoint(process)
        if not endpoint:
            return SelfTestReport("the process that was to hold blocks ended; what it logged says why")
        # A driver that hangs hears of no cancellation: its thread is left behind.
        fetching = asyncio.create_task(_fetch(order, endpoint, make_memory), name="kv transfer probe")
        done, _ = await asyncio.wait({fetching}, timeout=_READ_SECONDS)
        if not done:
            fetching.cancel()
            return SelfTestReport(f"blocks were not there {_READ_SECONDS:g} s after the other process was ready")
        return fetching.result()
    except TimeoutError:
        return SelfTestReport(f"the process that was to hold blocks was not ready after {start_seconds:g} s")
    except (ConfigurationError, KVError) as error:
        return SelfTestReport(str(error))
    finally:
        await _end(process)


async def hold(make_memory: MakeMemory) -> None:
    """The other process: until standard input ends."""
    lines = asyncio.to_thread(sys.stdin.readline)
    order = Order(**json.loads(await lines))
    async with AsyncExitStack() as stack:
        connector, scratch = await _open(order, make_memory, stack, "probe", order.epoch)
        await scratch.fill(order.pattern)
        await connector.publish(order.blocks)
        sys.stdout.buffer.write(_ANSWER + connector.endpoint.encode() + b"\n")
        sys.stdout.buffer.flush()
        await asyncio.to_thread(sys.stdin.read)


async def _end(process: Process) -> None:
    """It cleans up behind itself when its input ends, unless it hangs."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        # One that hangs in a driver is not even killed: whoever reaps it, it is not waited for.
        await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=_END_SECONDS)


async def _endpoint(process: Process) -> str:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.startswith(_ANSWER):  # libraries may have something to say, too
            return line.removeprefix(_ANSWER).decode().strip()
    return ""


async def _fetch(order: Order, endpoint: str, make_memory: MakeMemory) -> SelfTestReport:
    async with AsyncExitStack() as stack:
        connector, scratch = await _open(order, make_memory, stack, "reader", order.epoch ^ 1)
        source = KVSource("self-test-probe", order.epoch, endpoint)
        seconds = 0.0
        for _ in range(2):  # the first one connects, the second one is timed
            started = time.monotonic()
            outcomes = (await connector.fetch(source, order.blocks, timeout=_FETCH_SECONDS)).outcomes
            seconds = time.monotonic() - started
            in_vain = [outcome for outcome in outcomes if outcome is not FetchOutcome.FETCHED]
            if in_vain:
                return SelfTestReport(f"{len(in_vain)} of {len(outcomes)} blocks did not arrive: {in_vain[0].value}")
        arrived = await scratch.content()
        return judge(order.pattern, arrived, SCRATCH_LAYOUT.block_bytes, len(arrived) / seconds)


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
    """A whole pool in the host's hands."""

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


if __name__ == "__main__":
    from kvrelay.node.cuda_pool import cuda_scratch

    asyncio.run(hold(cuda_scratch))
