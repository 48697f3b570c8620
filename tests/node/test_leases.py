"""A lease ends exactly once, by release or by expiry."""

import asyncio

import pytest

from prefill_node.leases import LeaseTable
from tests.manual_clock import ManualClock

PATIENCE = 10.0


def make() -> tuple[LeaseTable, ManualClock, list[str]]:
    clock, ended = ManualClock(), list[str]()
    return LeaseTable(clock, ended.append), clock, ended


def test_release_is_idempotent_and_takes_unknown_ids() -> None:
    leases, _, ended = make()
    leases.open("a", 10)
    leases.release(["a", "b"])
    leases.release(["a"])
    assert ended == ["a"]
    assert len(leases) == 0 and leases.counts.released == 1
    leases.open("c", 10)
    leases.end_early("c")
    leases.end_early("c")
    assert ended == ["a", "c"]
    assert (leases.counts.released, leases.counts.ended_early) == (1, 1)


def test_leases_that_are_not_renewed_expire() -> None:
    leases, clock, ended = make()
    leases.open("a", 10)
    leases.open("b", 10)
    clock.seconds += 9
    leases.sweep()
    assert leases.renew(["a", "gone"], 10) == ["gone"]
    clock.seconds += 2
    leases.sweep()
    assert ended == ["b"]
    assert leases.counts.expired == 1
    leases.release(["b"])
    clock.seconds += 9
    leases.sweep()
    assert ended == ["b", "a"]
    assert leases.counts.expired == 2


async def test_closing_ends_the_leases_that_are_left() -> None:
    leases, _, ended = make()
    leases.start(lambda error: None)
    leases.open("a", 10)
    await leases.close()
    assert ended == ["a"]


async def test_a_sweeper_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases would not expire any more, and their blocks stay pinned."""

    def fail() -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr("prefill_node.leases._SWEEP_SECONDS", 0.0)
    leases = LeaseTable(ManualClock(), lambda lease_id: None, on_sweep=fail)
    failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    leases.start(failure.set_result)
    assert isinstance(await asyncio.wait_for(failure, PATIENCE), ValueError)
    await leases.close()
