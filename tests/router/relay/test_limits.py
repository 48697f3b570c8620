"""How many requests the relay takes at a time, and what it refuses."""

import asyncio

import pytest

from kvrelay.core.errors import InvalidRequestError, KVRelayError, OverloadedError
from tests.router.routed import a_request, collected, expire
from tests.router.scripted_cluster import cluster


async def test_waiting_requests_count_towards_the_limit_and_their_deadline_holds() -> None:
    async with cluster(num_prefill_nodes=0, max_concurrent_requests=1) as nodes:
        waiting = asyncio.create_task(collected(nodes, a_request()))
        await nodes.decode.admit()  # and nothing more: it waits there
        with pytest.raises(OverloadedError, match="1 requests are running or waiting"):
            nodes.relay.check_capacity()
        with pytest.raises(OverloadedError):
            await collected(nodes, a_request("second"))
        expire(nodes)
        with pytest.raises(KVRelayError, match="longer than 60 seconds"):
            await waiting
        nodes.relay.check_capacity()
        with pytest.raises(OverloadedError):
            nodes.relay.check_capacity(1)


async def test_a_call_of_many_prompts_needs_room_for_all_of_them() -> None:
    async with cluster(num_prefill_nodes=0, max_concurrent_requests=3) as nodes:
        nodes.relay.check_capacity(0, 3)
        with pytest.raises(OverloadedError):
            nodes.relay.check_capacity(1, 3)
        with pytest.raises(InvalidRequestError, match="prompt has 4 entries, more than the 3 requests"):
            nodes.relay.check_capacity(0, 4)
