"""Nodes are drained and restarted in turn while clients ask, and no client notices. Here it is one node of each kind,
to save time; `python -m tests.chaos --rolling-restart` restarts every node."""

import pytest

from tests.chaos.report import Report
from tests.chaos.rolling import rolling_restart
from tests.chaos.run import Stage, look_around, note, under_load

NODES = ("prefill-1", "decode-0")

pytestmark = [pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]


async def test_a_rolling_restart_loses_nothing(on: Stage) -> None:
    load, report = on.load(seed=5), Report("rolling restart", "shared_memory", seed=5)
    async with under_load(load, 4):
        statuses = await rolling_restart(on.cluster, NODES)
    assert statuses == dict.fromkeys(NODES, 0)
    note(load, report)
    await look_around(on.cluster, report)
    assert report.violations == {}, report.readable()
    assert report.requests > len(on.asks)
