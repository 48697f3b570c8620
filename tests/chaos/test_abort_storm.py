"""Hundreds of clients that leave at any point; 2,000 of them with `python -m tests.chaos --storm 2000`."""

import pytest

from tests.chaos.conftest import Ready
from tests.chaos.report import Report
from tests.chaos.run import look_around, note
from tests.chaos.storm import Storm

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]


async def test_an_abort_storm_leaves_nothing(ready: Ready) -> None:
    storm, report = Storm(ready.cluster, ready.asks, ready.expected, seed=7), Report("shared_memory", 7)
    await storm.run(300)
    note(storm, report)
    await look_around(ready.cluster, report)
    assert report.violations == {}, report.readable()
    assert report.requests == 300 and report.aborted_by_clients > 200
