"""Whether a transport moves bytes on this machine: two connectors over scratch pools, and a comparison of every byte.

A library that is installed need not work: devices, limits and configuration differ. The connectors' own digests are not
relied on: what is compared is what lies in memory.
Invariant: nothing of the node's connector is touched and its pool is as it was; nothing is left behind but, in a store,
one block until its TTL ends.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from kv_connector.base import FetchOutcome, HostConnector, PoolBuffer
from kv_connector.device.memory import BlockCopy, DeviceMemory
from kvrelay.core.block_hash import HASH_BYTES, BlockHash
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv_layout import KVLayout
from kvrelay.core.kv_source import KVSource
from kvrelay.core.named_block import NamedBlock

# 128 KiB a block.
SCRATCH_LAYOUT = KVLayout(num_kv_heads=2, num_layers=16, block_size=16, head_dim=64, dtype="bfloat16")
SCRATCH_BLOCKS = 16
_TIMEOUT = 5.0
_DEVICE_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """`problem`: why the transport is of no use, or "". `is_wrong`: it brought other bytes and called them good.
    `bytes_per_second`: of a few blocks, once connected."""

    problem: str = ""
    is_wrong: bool = False
    bytes_per_second: float = 0.0


async def check_transport(make: Callable[[], HostConnector], *, timeout: float = _TIMEOUT) -> SelfTestReport:
    """Moves blocks from one connector to another. `timeout` in seconds is for a fetch, and twice as much for all of it;
    a transport that has not ended then is left to itself. Raises what `make` does."""
    test = asyncio.get_running_loop().create_task(_check_transport(make(), make(), timeout), name="kv self-test")
    done, _ = await asyncio.wait([test], timeout=2 * timeout)
    if not done:
        test.cancel()
        return SelfTestReport(f"it has not ended after {2 * timeout:g} s")
    try:
        return test.result()
    except (ConfigurationError, KVError) as error:
        return SelfTestReport(str(error))


async def _check_transport(holder: HostConnector, reader: HostConnector, timeout: float) -> SelfTestReport:
    async with AsyncExitStack() as stack:
        count = 1 if holder.has_store else SCRATCH_BLOCKS
        epoch = secrets.randbits(63)
        pools: list[PoolBuffer] = []
        for connector, name in ((holder, "holder"), (reader, "reader")):
            stack.push_async_callback(connector.close)
            pools.append(
                connector.allocate(SCRATCH_LAYOUT, count, node_id=f"self-test-{name}", epoch=epoch + len(pools))
            )
        pattern = os.urandom(count * SCRATCH_LAYOUT.block_bytes)
        pools[0].memory[:] = pattern
        blocks = [
            NamedBlock(index, BlockHash(os.urandom(HASH_BYTES)), SCRATCH_LAYOUT.block_size) for index in range(count)
        ]
        await holder.publish(blocks)
        source = None if holder.has_store else KVSource("self-test-holder", epoch, holder.endpoint)
        rate = 0.0
        for _ in range(2):  # the first one connects, the second one is timed
            started = time.monotonic()
            outcomes = (await reader.fetch(source, blocks, timeout=timeout)).outcomes
            rate = len(pattern) / (time.monotonic() - started)
            in_vain = [outcome for outcome in outcomes if outcome is not FetchOutcome.FETCHED]
            if in_vain:
                return SelfTestReport(f"{len(in_vain)} of {count} blocks did not arrive: {in_vain[0].value}")
        return judge(pattern, bytes(pools[1].memory), SCRATCH_LAYOUT.block_bytes, rate)


def check_device(memory: DeviceMemory, staging: PoolBuffer) -> SelfTestReport:
    """Copies blocks to the device and back, over `staging`, to which it is attached. Neither is in use yet; both are
    zero again afterwards. Waits for the device."""
    block_bytes = staging.layout.block_bytes
    count = min(_DEVICE_BLOCKS, memory.num_blocks, staging.num_blocks // 2)
    size = count * block_bytes
    pattern = os.urandom(size)
    # There under one slot, back under another and in another order.
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
    return judge(pattern, arrived, block_bytes, rate)


def judge(pattern: bytes, arrived: bytes, block_bytes: int, rate: float) -> SelfTestReport:
    """Every byte counts."""
    starts = range(0, len(pattern), block_bytes)
    wrong = sum(pattern[start : start + block_bytes] != arrived[start : start + block_bytes] for start in starts)
    if wrong:
        return SelfTestReport(f"{wrong} of {len(starts)} blocks arrived with other bytes", is_wrong=True)
    return SelfTestReport(bytes_per_second=rate)
