"""The router's streams from a prefill node, without the rest of the router."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from kvrelay.core.errors import UnavailableError
from kvrelay.core.generation.sampling_params import SamplingParams
from router.relay.prefill_client import PrefillAccepted, PrefillClient, PrefillEnded, PrefillEvent, PrefillSession
from router.request import NodeRequest
from tests.router.scripted_nodes import NAMESPACE, PATIENCE, ScriptedPrefill, soon

Events = asyncio.Queue[PrefillEvent]
REQUEST = NodeRequest((5, 6, 7), SamplingParams(seed=1), NAMESPACE, 0, b"", 0, 0, is_replay=False)


@asynccontextmanager
async def prefilling() -> AsyncIterator[tuple[ScriptedPrefill, PrefillClient, PrefillSession, Events]]:
    """Yields a node, the router's client of it, and a request that was sent to it, with its events."""
    node = ScriptedPrefill()
    await node.start()
    async with grpc.aio.insecure_channel(node.address) as channel:
        client = PrefillClient(channel, node.address, lease_ttl=10.0, timeout=PATIENCE)
        events: Events = asyncio.Queue()
        yield node, client, client.prefill("one", REQUEST, (), timeout=PATIENCE, sink=events.put_nowait), events
        await client.close()
    await node.stop()


@pytest.mark.parametrize("node_is_lost", [False, True])
async def test_a_stream_is_ended_by_its_call_and_what_reads_it_reads_on(node_is_lost: bool) -> None:
    """If the task that reads were cancelled, gRPC would lose the memory of a message that has just come: a hundred
    bytes for each request, for ever."""
    async with prefilling() as (node, client, session, events):
        call = await soon(node.calls)
        call.accept()
        assert await soon(events) == PrefillAccepted()
        [reading] = client._tasks
        call.publish(1)
        if node_is_lost:
            client.lose(UnavailableError("it is silent"))
            assert isinstance(events.get_nowait(), PrefillEnded)
        session.close()
        assert not reading.done() and not reading.cancelling()
        await asyncio.wait({reading}, timeout=PATIENCE)
        assert reading.cancelled() and events.empty()
        assert await soon(node.released) == ("lease",)


async def test_a_stream_that_has_ended_lets_go_of_its_prompt_though_its_session_goes_on() -> None:
    """The session lasts as long as the output, which may take minutes."""
    async with prefilling() as (node, _, session, events):
        assert session._call is not None
        prompt = weakref.ref(session._call)
        call = await soon(node.calls)
        call.accept()
        call.end()
        assert [await soon(events), await soon(events)] == [PrefillAccepted(), PrefillEnded(None)]
        gc.collect()
        assert prompt() is None and session.has_lease
        session.close()
