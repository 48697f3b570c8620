"""Leases: what a renewal changes that fails or is not answered, and what an answer that a lease is gone."""

import asyncio
from contextlib import aclosing

from kvrelay.core.errors import UnavailableError
from tests.router.routed import a_request, give_up, take
from tests.router.scripted_cluster import cluster
from tests.router.scripted_nodes import soon


async def test_a_lease_is_renewed_before_it_would_end() -> None:
    lease_ttl = 2.0
    async with cluster(lease_ttl=lease_ttl) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first = asyncio.create_task(take(events))
        (await soon(nodes.prefill.calls)).accept("lease")
        async with asyncio.timeout(lease_ttl):
            assert await nodes.prefill.renewed.get() == ("lease",)
        await give_up(first)


async def test_a_renewal_that_fails_is_tried_again() -> None:
    async with cluster(lease_ttl=0.15) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        nodes.prefill.renewal_failures.append(UnavailableError("not now"))
        first = asyncio.create_task(take(events))
        (await soon(nodes.prefill.calls)).accept("lease")
        assert await soon(nodes.prefill.renewed) == ("lease",)
        assert not nodes.prefill.renewal_failures
        await give_up(first)


async def test_a_renewal_that_is_not_answered_is_given_up_before_the_lease_ends() -> None:
    """Otherwise it would hold up those that follow, of all leases at the node."""
    async with cluster(lease_ttl=0.15) as nodes, aclosing(nodes.relay.run(a_request())) as events:
        nodes.prefill.num_unanswered = 1
        first = asyncio.create_task(take(events))
        (await soon(nodes.prefill.calls)).accept("lease")
        assert await soon(nodes.prefill.renewed) == ("lease",)
        assert not nodes.prefill.num_unanswered
        await give_up(first)


async def test_a_lease_that_its_node_has_forgotten_is_renewed_no_more() -> None:
    async with cluster(lease_ttl=0.15) as nodes:
        nodes.prefill.forgotten.add("gone")
        waiting = []
        for lease_id in ("gone", "kept"):
            waiting.append(asyncio.create_task(take(nodes.relay.run(a_request(lease_id)))))
            (await soon(nodes.prefill.calls)).accept(lease_id)
        while "gone" not in await soon(nodes.prefill.renewed):
            pass
        assert await soon(nodes.prefill.renewed) == ("kept",)
        for task in waiting:
            await give_up(task)
