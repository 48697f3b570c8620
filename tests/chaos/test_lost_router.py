"""A router that is killed: its clients get an error, its nodes free what it held, and another one serves at once. One
that is stopped for a while goes on with all that it had."""

import asyncio
import signal

import pytest

from tests.chaos.load import Load, undisturbed
from tests.chaos.report import Report
from tests.chaos.run import Stage, look_around, under_load
from tests.chaos.streams import Protocol
from tests.chaos.verdict import Verdict, differences
from tests.e2e.processes import PATIENCE_SECONDS

STOPPED_SECONDS = 7.0
NUM_STREAMS = 6

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
    assert differences(again, on.expected) == []
    assert await cluster.num_expired_leases() > 0
    report = Report("lost router", "shared_memory", seed=0)
    await look_around(cluster, report)
    assert report.violations == {}, report.readable()


async def test_a_router_that_was_stopped_for_seconds_blames_no_node_and_is_not_given_up(on: Stage) -> None:
    cluster, load = on.cluster, on.load(seed=3)
    num_placed_again = await cluster.metric("kvrelay:request_migrations_total")
    async with under_load(load, NUM_STREAMS):
        await num_answers(load, 1)
        cluster.router.send(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(STOPPED_SECONDS, cluster.router.send, signal.SIGCONT)
        await num_answers(load, load.report.requests + 2 * NUM_STREAMS)
    assert max(load.report.longest_gap, load.report.longest_first) > STOPPED_SECONDS / 2, "no request ran meanwhile"
    assert (load.report.refusals, set(load.report.verdicts)) == ([], {Verdict.RIGHT}), load.report.examples
    assert await cluster.metric("kvrelay:request_migrations_total") == num_placed_again


async def num_answers(load: Load, number: int) -> None:
    """Returns when the clients have had so many answers."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while load.report.requests < number:
            await asyncio.sleep(0.05)
