"""Hundreds of clients that leave at any point. `python -m tests.chaos --storm 2000` runs 2,000 of them."""

import pytest

from tests.chaos.report import Report
from tests.chaos.run import Stage, look_around, note
from tests.chaos.storm import Storm

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]


async def test_an_abort_storm_leaves_nothing(on: Stage) -> None:
    storm, report = Storm(on.cluster, on.asks, on.expected, seed=7), Report("abort storm", "shared_memory", seed=7)
    num_expired = await on.cluster.num_expired_leases()
    await storm.run(300)
    note(storm, report)
    await look_around(on.cluster, report)
    assert report.violations == {}, report.readable()
    assert await on.cluster.num_expired_leases() == num_expired
    assert report.requests == 300 and report.aborted_by_clients > 200
