"""A node whose ejection is over: a request tries it now and then, and others go elsewhere, until one has gone well."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from kvrelay.core.errors import KVRelayError, UnavailableError
from router.nodes.node import NodeHandle
from router.nodes.outlier import Outlier
from router.request import RequestEvent
from tests.manual_clock import ManualClock
from tests.router.routed import LAST, a_request, collected, give_up
from tests.router.scripted_cluster import Cluster, cluster
from tests.router.scripted_nodes import soon, token, until

BUSY = 10_000
Serving = asyncio.Task[list[RequestEvent]]


def put_on_probation(node: NodeHandle) -> ManualClock:
    """Returns the clock of the node's record."""
    clock = ManualClock()
    node.outlier = Outlier(f"node {node.address}", clock, Random(0))
    for _ in range(5):
        node.outlier.failed(UnavailableError("out of luck"))
    clock.seconds += 5.1
    assert node.outlier.is_on_probation
    return clock


@asynccontextmanager
async def one_of_two_decode_nodes_on_probation() -> AsyncIterator[tuple[Cluster, ManualClock]]:
    """Yields two decode nodes, of which the first is on probation and much cheaper than the other, and the clock of
    its record."""
    async with cluster(num_prefill_nodes=0, num_decode_nodes=2, silence=30.0) as nodes:
        tried, other = nodes.registry.decode
        other.num_sequences += BUSY
        yield nodes, put_on_probation(tried)


async def sent(nodes: Cluster, request_id: str, place: int) -> tuple[Serving, str]:
    """Returns a request that goes to the decode node at `place`, and its name there."""
    serving = asyncio.create_task(collected(nodes, a_request(request_id)))
    return serving, (await nodes.decodes[place].admit()).request_id


async def test_while_one_request_tries_a_decode_node_others_go_elsewhere_until_it_has_gone_well() -> None:
    async with one_of_two_decode_nodes_on_probation() as (nodes, _):
        trial, wire_id = await sent(nodes, "trial", 0)
        others = [await sent(nodes, "second", 1)]
        nodes.decodes[0].tokens(wire_id, token(7))
        await until(lambda: nodes.registry.decode[0].num_queued_tokens == 0)
        others.append(await sent(nodes, "third", 1))
        nodes.decodes[0].tokens(wire_id, LAST)
        await trial
        others += [await sent(nodes, "fourth", 0), await sent(nodes, "fifth", 0)]
        for serving, _ in others:
            await give_up(serving)


async def test_a_trial_that_fails_ejects_the_node_again() -> None:
    async with one_of_two_decode_nodes_on_probation() as (nodes, _):
        trial, wire_id = await sent(nodes, "trial", 0)
        nodes.decodes[0].failed(wire_id, KVRelayError("still out of luck"))
        with pytest.raises(KVRelayError, match="still out of luck"):
            await trial
        outlier = nodes.registry.decode[0].outlier
        assert outlier.is_ejected and outlier.num_ejections == 2
        following, _ = await sent(nodes, "second", 1)
        await give_up(following)


async def test_a_trial_that_takes_long_or_shows_nothing_is_followed_by_another() -> None:
    async with one_of_two_decode_nodes_on_probation() as (nodes, clock):
        given_up, _ = await sent(nodes, "first", 0)
        await give_up(given_up)
        await nodes.decodes[0].aborted()
        others = [await sent(nodes, "second", 1)]
        for request_id in ("third", "fourth"):
            clock.seconds += 5.0
            others.append(await sent(nodes, request_id, 0))
        assert nodes.registry.decode[0].outlier.is_on_probation
        for serving, _ in others:
            await give_up(serving)


async def test_an_ejected_node_gets_nothing_while_another_is_tried() -> None:
    async with one_of_two_decode_nodes_on_probation() as (nodes, _):
        tried, other = nodes.registry.decode
        other.num_sequences -= BUSY
        tried.num_sequences += BUSY
        for _ in range(5):
            other.outlier.failed(UnavailableError("out of luck, too"))
        for serving, _ in [await sent(nodes, "first", 0), await sent(nodes, "second", 0)]:
            await give_up(serving)


async def test_a_node_on_probation_takes_all_requests_if_there_is_no_other() -> None:
    async with cluster(num_prefill_nodes=0) as nodes:
        put_on_probation(nodes.registry.decode[0])
        for serving, _ in [await sent(nodes, "first", 0), await sent(nodes, "second", 0)]:
            await give_up(serving)


async def test_one_prompt_at_a_time_tries_a_prefill_node_until_its_first_token() -> None:
    async with cluster(num_prefill_nodes=2, silence=30.0) as nodes:
        tried, other = nodes.registry.prefill
        other.num_queued_tokens += BUSY
        put_on_probation(tried)
        running = [asyncio.create_task(collected(nodes, a_request("trial")))]
        trial = await soon(nodes.prefills[0].calls)
        running.append(asyncio.create_task(collected(nodes, a_request("second"))))
        await soon(nodes.prefills[1].calls)
        for _ in running:
            await nodes.decode.admit()
        trial.accept()
        trial.finish(token(7))
        await nodes.decode.started()  # so that the router knows of the first token
        for request_id in ("third", "fourth"):
            running.append(asyncio.create_task(collected(nodes, a_request(request_id))))
            await soon(nodes.prefills[0].calls)
        for serving in running:
            await give_up(serving)
