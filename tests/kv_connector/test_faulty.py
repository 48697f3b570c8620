"""The connector that goes wrong on purpose: what each fault does, and that no damaged block counts as fetched."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.header import Mismatch
from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.errors import KVError
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, blocks, content, num_leading_fetched, write_and_publish
from tests.kv_connector.faulty import CallPlan, ConnectorFault, DamagingCopy, FaultyConnector, SeededFaults
from tests.simulation.virtual_loop import VirtualLoop, run_virtual

_TIMEOUT = 5.0


class Planned:
    """A source of faults, all of which are `fault` after `delay` seconds; None is no fault."""

    def __init__(self, fault: ConnectorFault | None = None, *, delay: float = 0.0) -> None:
        self.fault = fault
        self.delay = delay

    def plan(self, method: str) -> CallPlan:
        return CallPlan(self.fault, self.delay)


@asynccontextmanager
async def pair(faults: Planned, *, damage: float = 0.0) -> AsyncIterator[tuple[Node, Node]]:
    """Makes an owner without faults, and a peer whose calls go wrong."""
    hub = InProcessHub()
    copy = DamagingCopy(Random(1), probability=damage)
    owner = Node(InProcessConnector(hub), "owner", 16, LAYOUT, EPOCH)
    peer = Node(FaultyConnector(InProcessConnector(hub, copy=copy), faults), "peer", 16, LAYOUT, EPOCH + 1)
    try:
        yield owner, peer
    finally:
        await peer.connector.close()
        await owner.connector.close()


async def test_without_a_fault_calls_behave_as_those_of_the_wrapped_connector() -> None:
    async with pair(Planned()) as (owner, peer):
        wanted = blocks(4)
        await write_and_publish(owner, wanted)
        result = await peer.connector.fetch(owner.source, wanted, timeout=_TIMEOUT)
        assert num_leading_fetched(result) == 4
        assert all(peer.row(block.block_id) == content(block.block_hash, LAYOUT.block_bytes) for block in wanted)


@pytest.mark.parametrize("fault", [ConnectorFault.FAIL, ConnectorFault.LOSE])
async def test_a_call_that_fails_raises(fault: ConnectorFault) -> None:
    async with pair(Planned(fault)) as (owner, peer):
        wanted = blocks(2)
        with pytest.raises(KVError, match="injected"):
            await write_and_publish(peer, wanted)
        result = await owner.connector.fetch(peer.source, wanted, timeout=_TIMEOUT)
        was_done = fault is ConnectorFault.LOSE
        assert result == ((FetchOutcome.FETCHED if was_done else FetchOutcome.MISSING),) * 2
        with pytest.raises(KVError, match="injected"):
            await peer.connector.fetch(owner.source, wanted, timeout=_TIMEOUT)


async def test_a_fetch_that_stalls_ends_at_its_deadline() -> None:
    async with pair(Planned(ConnectorFault.STALL)) as (owner, peer):
        wanted = blocks(2)
        await write_and_publish(owner, wanted)
        result = await peer.connector.fetch(owner.source, wanted, timeout=0.01)
        assert result == (FetchOutcome.FAILED,) * 2


@pytest.mark.parametrize("delay", [0.0, 3.0, 20.0])
def test_a_fetch_that_stalls_takes_its_time_and_no_more(delay: float) -> None:
    """However long it had to wait before that. Time is virtual."""
    took: list[float] = []

    async def main(loop: VirtualLoop) -> None:
        async with pair(Planned(ConnectorFault.STALL, delay=delay)) as (owner, peer):
            await peer.connector.fetch(owner.source, blocks(2), timeout=_TIMEOUT)
            took.append(loop.time())

    run_virtual(main)
    assert took == [_TIMEOUT]


async def test_damaged_blocks_are_reported_as_refused() -> None:
    async with pair(Planned(ConnectorFault.DAMAGE)) as (owner, peer):
        wanted = blocks(4)
        await write_and_publish(owner, wanted)
        result = await peer.connector.fetch(owner.source, wanted, timeout=_TIMEOUT)
        assert result == (FetchOutcome.FETCHED,) * 2 + (FetchOutcome.REFUSED,) * 2
        assert peer.first_stats.refused[Mismatch.DIGEST] == 2


async def test_a_bit_that_flips_on_the_way_is_found() -> None:
    async with pair(Planned(), damage=1.0) as (owner, peer):
        wanted = blocks(4)
        await write_and_publish(owner, wanted)
        result = await peer.connector.fetch(owner.source, wanted, timeout=_TIMEOUT)
        assert result == (FetchOutcome.REFUSED,) * 4
        assert peer.first_stats.refused[Mismatch.DIGEST] == 4


def test_the_same_seed_plans_the_same_faults() -> None:
    def plans(seed: int) -> list[CallPlan]:
        faults = SeededFaults(Random(seed), probability=0.5, longest_delay=1.0)
        return [faults.plan(method) for method in ("publish", "fetch") * 50]

    assert plans(1) == plans(1) != plans(2)
    drawn = {plan.fault for plan in plans(1)}
    assert drawn == {None, *ConnectorFault}
    assert ConnectorFault.DAMAGE not in {plan.fault for plan in plans(1)[::2]}
