"""What the relay admits, and what it refuses."""

import asyncio
import re
from contextlib import aclosing
from dataclasses import replace
from random import Random

import pytest

from kvrelay.core.errors import InvalidRequestError, UnavailableError
from router.nodes.node import NodeState
from router.relay.relay import ClusterRelay
from tests.router.routed import LAST, a_request, collected, give_up, opened, take
from tests.router.scripted_cluster import cluster
from tests.router.scripted_nodes import NAMESPACE, until


async def test_an_id_is_one_request_s_while_it_runs() -> None:
    async with cluster() as nodes:
        request = a_request()
        for _ in range(2):
            async with aclosing(nodes.relay.run(request)) as events:
                first = asyncio.create_task(take(events))
                await nodes.decode.admit()
                with pytest.raises(InvalidRequestError, match="'r' is running already") as refused:
                    await take(nodes.relay.run(request))
                assert refused.value.field == "request_id"
                await give_up(first)
                await nodes.decode.aborted()


async def test_an_id_that_two_routers_serve_is_two_requests_at_a_node() -> None:
    """Clients choose the ids, and a router that was restarted counts from zero again."""
    async with cluster(num_prefill_nodes=0) as nodes:
        known = nodes.relay
        routers = [
            ClusterRelay(nodes.registry, nodes.placer, known._limits, known._metrics, random=Random(seed))
            for seed in range(2)
        ]
        clients = [asyncio.create_task(collected(replace(nodes, relay=router), a_request())) for router in routers]
        wire_ids = {(await nodes.decode.admit()).request_id for _ in clients}
        assert len(wire_ids) == 2
        for wire_id in wire_ids:
            nodes.decode.tokens(wire_id, LAST)
        for client in clients:
            assert LAST in await client


async def test_a_prompt_is_kept_once() -> None:
    """It may have many thousands of tokens, and a thousand requests may wait."""
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        first, _, _ = await opened(nodes, events)
        [run] = nodes.relay._running.values()
        [group] = run._groups
        assert group.attempt is not None
        assert group.attempt._node_request.token_ids is run._request.prompt_token_ids
        await give_up(first)


async def test_nothing_is_served_without_a_decode_node() -> None:
    async with cluster() as nodes:
        assert nodes.relay.served_model().kv_namespace == NAMESPACE
        await nodes.decode.stop()
        await until(lambda: nodes.registry.decode[0].state is not NodeState.LIVE)
        with pytest.raises(UnavailableError, match=r"no decode node can serve now: decode-0 \(.*\) is lost") as why:
            nodes.relay.served_model()
        with pytest.raises(UnavailableError, match=f"^{re.escape(str(why.value))}$"):  # validated before it was lost
            await anext(nodes.relay.run(a_request()))


async def test_a_request_for_another_model_than_that_of_the_nodes_is_not_begun() -> None:
    """They may have been replaced while its prompt was tokenised."""
    async with cluster() as nodes:
        request = replace(a_request(), kv_namespace=replace(NAMESPACE, model_fingerprint=bytes(32)))
        with pytest.raises(UnavailableError, match=r"no decode node lives that has this request's model .* included$"):
            await take(nodes.relay.run(request))
