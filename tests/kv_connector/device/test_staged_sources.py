"""A holder that is silent, among others, behind one staging: it holds up fetches from itself alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kv_connector.base import FetchOutcome, FetchOutcomes
from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from tests.kv_connector.backends import EPOCH, LAYOUT, DeviceNode, blocks, write_and_publish

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome
STAGING = 32 * LAYOUT.block_bytes  # 8 slots for what arrives


class HalfSilent(InProcessConnector):
    """A connector whose fetches from the node `silent` begin when `speaks` is set. `num_waiting` are about to."""

    def __init__(self, hub: InProcessHub) -> None:
        super().__init__(hub)
        self.speaks = asyncio.Event()
        self.num_waiting = 0

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        if source is not None and source.node_id == "silent":
            self.num_waiting += 1
            await self.speaks.wait()
        return await super().fetch(source, blocks, timeout=timeout)


async def test_a_silent_holder_leaves_slots_for_what_others_send(caplog: pytest.LogCaptureFixture) -> None:
    hub = InProcessHub()
    inner = HalfSilent(hub)
    owner = DeviceNode(InProcessConnector(hub), "owner", 64, LAYOUT, EPOCH)
    peer = DeviceNode(inner, "peer", 64, LAYOUT, EPOCH, staging_bytes=STAGING)
    wanted = blocks(8)
    await write_and_publish(owner, wanted)
    silent = replace(owner.source, node_id="silent")
    stuck = [asyncio.create_task(peer.connector.fetch(silent, wanted, timeout=60)) for _ in range(4)]
    while not inner.num_waiting:
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        assert set(await peer.connector.fetch(owner.source, wanted, timeout=10)) == {FETCHED}
    assert inner.num_waiting == 1 and not caplog.messages

    assert set(await peer.connector.fetch(silent, wanted, timeout=0.01)) == {FAILED}
    [message] = caplog.messages
    assert "from silent: no turn for 8 blocks in time" in message and "--kv-staging-gib" not in message
    inner.speaks.set()
    async with asyncio.timeout(10):
        for outcomes in await asyncio.gather(*stuck):
            assert set(outcomes) == {FETCHED}
    assert len(peer.staged._arrivals._free) == 8
    stuck.clear()
    for node in (owner, peer):
        await node.connector.close()
    assert not peer.staged._turns, "nothing is kept of sources that no fetch is from"
