"""A router that is killed: its clients get an error, its nodes free what it held, and another one serves at once."""

import asyncio
import signal

import pytest

from tests.chaos.load import undisturbed
from tests.chaos.report import Report
from tests.chaos.run import Stage, look_around
from tests.chaos.streams import Protocol
from tests.e2e.processes import PATIENCE_SECONDS

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]


async def test_nodes_free_what_a_killed_router_held_and_serve_the_next_one(on: Stage) -> None:
    """The router dies while leases are held: the decode nodes are stopped, so that they cannot have fetched what was
    prefilled."""
    cluster = on.cluster
    for node in cluster.of_role("decode"):
        node.send(signal.SIGSTOP)
    asks = [ask for ask in on.asks if ask.sampling.get("n", 1) == 1][:6]
    assert {ask.protocol for ask in asks} == set(Protocol)
    streams = [asyncio.create_task(cluster.client.ask(ask, salt=f"router {i}")) for i, ask in enumerate(asks)]
    while sum([(await node.load_when(bool)).num_leases for node in cluster.of_role("prefill")]) < len(asks):
        await asyncio.sleep(0.05)
    await cluster.router.kill()
    async with asyncio.timeout(PATIENCE_SECONDS):
        answers = await asyncio.gather(*streams)
    assert all(answer.error and not answer.finish_reasons for answer in answers)
    for node in cluster.of_role("decode"):
        node.send(signal.SIGCONT)

    await cluster.start_router()
    again = await undisturbed(cluster.client, on.asks)
    assert {name: answer.outputs for name, answer in again.items()} == {
        name: answer.outputs for name, answer in on.expected.items()
    }
    report = Report("lost router", "shared_memory", seed=0)
    await look_around(cluster, report)
    assert report.violations == {}, report.readable()
