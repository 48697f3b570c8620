"""Nodes that the router reaches, but that do not reach each other: prompts go where their KV gets through. The test
decides each answer of the nodes."""

import asyncio
from collections.abc import Collection
from random import Random

import pytest

from kvrelay.core.errors import UnavailableError
from kvrelay.core.node_report import NOTHING_FETCHED
from router.nodes.links import Links
from router.nodes.node import NodeState
from tests.manual_clock import ManualClock
from tests.router.routed import LAST, a_request, assert_idle, collected, fetched, give_up
from tests.router.scripted_cluster import Cluster, cluster
from tests.router.scripted_nodes import PrefillCall, soon, token, until


def watched(nodes: Cluster) -> ManualClock:
    """Returns a clock that the links to decode-0 go by from now on."""
    clock = ManualClock()
    nodes.registry.decode[0].links = Links(clock, Random(0))
    return clock


async def asked(nodes: Cluster) -> tuple[str, PrefillCall]:
    """Returns the id of the prefill node that is asked next, and the call."""
    await until(lambda: any(not node.calls.empty() for node in nodes.prefills))
    [node] = [node for node in nodes.prefills if not node.calls.empty()]
    call = await soon(node.calls)
    call.accept(f"lease {node.node_id}")
    call.publish(3)
    assert not (await nodes.decode.pull()).ended
    return node.node_id, call


async def served(nodes: Cluster, *, broken: Collection[str]) -> list[str]:
    """Serves a request at decode-0, to which the KV of the `broken` nodes does not get. Returns which nodes have
    computed its prompt: the decode node the last of them, if it had to."""
    client = asyncio.create_task(collected(nodes, a_request()))
    admit = await nodes.decode.admit()
    computed = ["decode-0"] if admit.local_prefill else await moved(nodes, admit.request_id, broken)
    nodes.decode.tokens(admit.request_id, LAST)
    assert LAST in await client
    assert_idle(nodes)
    return computed


async def moved(nodes: Cluster, wire_id: str, broken: Collection[str]) -> list[str]:
    name, call = await asked(nodes)
    computed = [name]
    call.finish(token(7))
    await nodes.decode.started()
    call.end()
    assert (await nodes.decode.pull()).ended
    if name in broken:
        nodes.decode.kv_missing(wire_id, 10)
        await until(lambda: not nodes.decode.commands.empty() or any(not node.calls.empty() for node in nodes.prefills))
        if nodes.decode.commands.empty():
            name, _ = await asked(nodes)
            computed.append(name)
            assert name not in broken, "what it computes would be lost as well"
        else:
            assert (await nodes.decode.pull()).final
    if name not in broken:
        nodes.decode.kv_ready(wire_id, fetched=10, fetches=fetched((name, 3)))
        return computed
    nodes.decode.kv_ready(wire_id, fetched=0, recomputed=10, fetches=fetched(num_failed=3))
    return [*computed, "decode-0"]


async def test_a_prefill_node_whose_kv_is_lost_on_the_way_gives_way_to_another_and_is_tried_again() -> None:
    async with cluster(num_prefill_nodes=2) as nodes:
        clock = watched(nodes)
        for _ in range(3):
            assert await served(nodes, broken={"prefill-0"}) == ["prefill-0", "prefill-1"]
            assert await served(nodes, broken={"prefill-0"}) == ["prefill-1"]
        for _ in range(4):
            assert await served(nodes, broken={"prefill-0"}) == ["prefill-1"], "computed once"
        clock.seconds += 0.5
        assert await served(nodes, broken={"prefill-0"}) == ["prefill-0", "prefill-1"]
        assert [await served(nodes, broken={"prefill-0"}) for _ in range(4)] == [["prefill-1"]] * 4
        clock.seconds += 1.0
        found = sorted([await served(nodes, broken={}) for _ in range(4)])
        assert found == [["prefill-0"]] * 2 + [["prefill-1"]] * 2


async def test_a_decode_node_that_no_kv_reaches_computes_its_prompts_once_until_one_does() -> None:
    async with cluster() as nodes:
        clock = watched(nodes)
        for _ in range(3):
            assert await served(nodes, broken={"prefill-0"}) == ["prefill-0", "decode-0"]
        for _ in range(3):
            assert await served(nodes, broken={"prefill-0"}) == ["decode-0"]
        clock.seconds += 0.5
        assert [await served(nodes, broken={}) for _ in range(3)] == [["prefill-0"]] * 3


async def test_a_refill_is_not_asked_of_a_node_whose_kv_is_lost_on_the_way_too() -> None:
    async with cluster(num_prefill_nodes=3) as nodes:
        watched(nodes)
        for _ in range(3):
            nodes.registry.decode[0].links.begin(nodes.registry.prefill[1].source, "decode-0").settle(
                NOTHING_FETCHED, lacks_blocks=True
            )
        for _ in range(6):
            assert "prefill-1" not in await served(nodes, broken={"prefill-0", "prefill-1"})


async def test_a_decode_node_that_was_restarted_is_reached_anew() -> None:
    async with cluster() as nodes:
        watched(nodes)
        for _ in range(3):
            await served(nodes, broken={"prefill-0"})
        assert nodes.registry.decode[0].links.broken() == [nodes.registry.prefill[0].source]
        await nodes.decode.stop()
        await nodes.decode.start_again(epoch=2)
        await until(lambda: nodes.registry.decode[0].links.broken() == [])


async def test_a_prefill_node_that_was_restarted_is_tried_at_once() -> None:
    async with cluster() as nodes:
        watched(nodes)
        for _ in range(3):
            await served(nodes, broken={"prefill-0"})
        assert await served(nodes, broken={}) == ["decode-0"]
        await nodes.prefill.stop()
        await nodes.prefill.start_again(epoch=2)
        [node] = nodes.registry.prefill
        await until(lambda: node.state is NodeState.LIVE and node.source.epoch == 2)
        assert await served(nodes, broken={}) == ["prefill-0"]


async def missed(nodes: Cluster) -> str:
    """Returns the name of a request at decode-0, to which nothing of what prefill-0 has published gets."""
    wire_id = (await nodes.decode.admit()).request_id
    name, call = await asked(nodes)
    assert name == "prefill-0"
    call.finish(token(7))
    await nodes.decode.started()
    call.end()
    assert (await nodes.decode.pull()).ended
    nodes.decode.kv_missing(wire_id, 10)
    return wire_id


async def test_a_decode_node_that_has_found_the_blocks_elsewhere_says_nothing_of_a_link() -> None:
    async with cluster() as nodes:
        watched(nodes)
        for _ in range(3):
            client = asyncio.create_task(collected(nodes, a_request()))
            wire_id = (await nodes.decode.admit()).request_id
            _, call = await asked(nodes)
            call.finish(token(7))
            await nodes.decode.started()
            nodes.decode.kv_ready(wire_id, fetched=10, fetches=fetched(("decode-1", 3)))
            nodes.decode.tokens(wire_id, LAST)
            assert LAST in await client
        assert nodes.registry.decode[0].links.broken() == []


@pytest.mark.parametrize("fails", [True, False])
async def test_a_refill_that_fails_before_it_sends_or_is_not_needed_says_nothing_of_its_link(fails: bool) -> None:
    async with cluster(num_prefill_nodes=2) as nodes:
        watched(nodes)
        for number in range(3):
            nodes.prefills[1].update(number + 1, num_queued_tokens=5000)  # so that it is the second choice
            await until(lambda: nodes.registry.prefill[1].load.num_queued_tokens > 0)
            client = asyncio.create_task(collected(nodes, a_request()))
            wire_id = await missed(nodes)
            if fails:
                (await soon(nodes.prefills[1].calls)).end(UnavailableError("died"))
                assert (await nodes.decode.pull()).ended
                nodes.decode.kv_ready(wire_id, fetched=0, recomputed=10, fetches=fetched(num_missing=3))
            else:
                assert (await asked(nodes))[0] == "prefill-1"
                nodes.decode.kv_ready(wire_id, fetched=10, fetches=fetched(("decode-1", 3)))
            nodes.decode.tokens(wire_id, LAST)
            assert LAST in await client
        assert nodes.registry.decode[0].links.broken() == [nodes.registry.prefill[0].source]


@pytest.mark.parametrize("by_refill", [True, False])
async def test_a_trial_whose_client_leaves_makes_room_for_another(by_refill: bool) -> None:
    async with cluster(num_prefill_nodes=2) as nodes:
        clock = watched(nodes)
        links = nodes.registry.decode[0].links
        tried = nodes.registry.prefill[1 if by_refill else 0].source
        for _ in range(3):
            links.begin(tried, "decode-0").settle(NOTHING_FETCHED, lacks_blocks=True)
        clock.seconds += 0.5
        client = asyncio.create_task(collected(nodes, a_request()))
        if by_refill:
            await missed(nodes)
        else:
            await nodes.decode.admit()
        assert (await asked(nodes))[0] == tried.node_id
        assert links.broken() == [tried]
        await give_up(client)
        assert links.broken() == []
        assert_idle(nodes)
