"""Whether a connector moves bytes on this machine: one holds blocks in a scratch pool, another fetches them.

A library that is installed need not work: devices, limits and configuration differ. The connectors' own digests are not
relied on: every byte in memory is compared. Pools on a device: `device/self_test.py`.
Invariant: nothing of the node's connector is touched and its pool is as it was; nothing is left behind but, in a store,
one block until its TTL ends.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from kv_connector.base import AccessDeniedError, FetchOutcome, HostConnector, KVConnector, PoolBuffer
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.block_hash import HASH_BYTES, BlockHash
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource

# 128 KiB a block.
SCRATCH_LAYOUT = KVLayout(num_kv_heads=2, num_layers=16, block_size=16, head_dim=64, dtype="bfloat16")
SCRATCH_BLOCKS = 16
_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """The result of a self-test. `problem`: why the connector is of no use, or "". `is_wrong`: it brought other bytes
    and reported them as right. `is_denied`: a store does not let us in. `is_unfinished`: the test did not come to an
    end, so that another may find otherwise. `bytes_per_second`: over a few blocks, once connected."""

    problem: str = ""
    is_wrong: bool = False
    is_denied: bool = False
    is_unfinished: bool = False
    bytes_per_second: float = 0.0


async def check_connector(make: Callable[[], HostConnector], *, timeout: float = _TIMEOUT) -> SelfTestReport:
    """Moves blocks between two connectors that `make` returns. `timeout` in seconds limits one fetch, and twice as much
    the whole test; a connector that has not ended then is abandoned. Raises what `make` raises."""
    test = asyncio.get_running_loop().create_task(_check_connector(make(), make(), timeout), name="kv self-test")
    done, _ = await asyncio.wait([test], timeout=2 * timeout)
    if not done:
        test.cancel()
        return SelfTestReport(f"it has not ended after {2 * timeout:g} s")
    try:
        return test.result()
    except (ConfigurationError, KVError) as error:
        return SelfTestReport(str(error), is_denied=isinstance(error, AccessDeniedError))


async def _check_connector(holder: HostConnector, reader: HostConnector, timeout: float) -> SelfTestReport:
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
        report = await fetch_scratch(reader, source, blocks, timeout=timeout)
        if report.problem:
            return report
        arrived = bytes(pools[1].memory)
        return compare_blocks(pattern, arrived, SCRATCH_LAYOUT.block_bytes, report.bytes_per_second)


async def fetch_scratch(
    reader: KVConnector, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float
) -> SelfTestReport:
    """Fetches blocks of `SCRATCH_LAYOUT` twice, of which the first time connects and the second is timed. Returns the
    rate, or which problem the connector itself reports. Raises what `fetch` raises."""
    num_bytes = len(blocks) * SCRATCH_LAYOUT.block_bytes
    rate = 0.0
    for _ in range(2):
        started = time.monotonic()
        outcomes = await reader.fetch(source, blocks, timeout=timeout)
        rate = num_bytes / (time.monotonic() - started)
        failures = [outcome for outcome in outcomes if outcome is not FetchOutcome.FETCHED]
        if failures:
            return SelfTestReport(f"{len(failures)} of {len(blocks)} blocks did not arrive: {failures[0].value}")
    return SelfTestReport(bytes_per_second=rate)


def compare_blocks(sent: bytes, arrived: bytes, block_bytes: int, rate: float) -> SelfTestReport:
    """Returns a report with `rate` when all blocks are the same, otherwise one that counts those that differ."""
    starts = range(0, len(sent), block_bytes)
    wrong = sum(sent[start : start + block_bytes] != arrived[start : start + block_bytes] for start in starts)
    if wrong:
        return SelfTestReport(f"{wrong} of {len(starts)} blocks arrived with other bytes", is_wrong=True)
    return SelfTestReport(bytes_per_second=rate)
