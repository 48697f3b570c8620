"""A few seconds of what `make chaos` does for minutes: faults by seed, under load, without any loss."""

import pytest

from tests.chaos.conftest import MAX_TOKENS
from tests.chaos.report import Report
from tests.chaos.run import Plan, Stage, disturb, look_around

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]


async def test_nothing_is_lost_in_chaos(on: Stage) -> None:
    plan = Plan("shared_memory", seed=3, seconds=10, max_tokens=MAX_TOKENS, most_after=1.0, most_fault_seconds=2.0)
    report = Report("chaos", plan.connector, plan.seed)
    await disturb(plan, on, report)
    await look_around(on.cluster, report)
    assert report.violations == {}, report.readable()
    assert report.requests > 0 and report.aborted_by_clients > 0 and report.faults
