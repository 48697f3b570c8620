"""The router's stream to a prefill node, without the rest of the router."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from kvrelay.core.errors import DeadlineError, UnavailableError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.v1 import prefill_node_pb2, prefill_node_pb2_grpc
from router.relay.prefill_client import (
    PrefillAccepted,
    PrefillClient,
    PrefillEnded,
    PrefillEvent,
    PrefillFinished,
    PrefillProgress,
    PrefillSession,
)
from router.request import NodeRequest
from tests.router.scripted_nodes import NAMESPACE, PATIENCE, ScriptedPrefill, soon, token, until
from tests.simulation.network import Fate, Message, Network
from tests.simulation.rpc import Channel, Server
from tests.simulation.virtual_loop import Process, VirtualLoop, run_virtual

Events = asyncio.Queue[PrefillEvent]
REQUEST = NodeRequest((5, 6, 7), SamplingParams(seed=1), NAMESPACE, 0, b"", 0, 0, is_replay=False)


@asynccontextmanager
async def prefilling(
    make: type[ScriptedPrefill] = ScriptedPrefill,
) -> AsyncIterator[tuple[ScriptedPrefill, PrefillClient, PrefillSession, Events]]:
    """Yields a node, the router's client of it, and a request that was sent to it, with its events."""
    node = make()
    await node.start()
    async with grpc.aio.insecure_channel(node.address) as channel:
        client = PrefillClient(channel, node.address, lease_ttl=3 * PATIENCE, timeout=PATIENCE)
        events: Events = asyncio.Queue()
        session = client.prefill("one", REQUEST, (), epoch=node.epoch, timeout=PATIENCE, sink=events.put_nowait)
        yield node, client, session, events
        await client.close()
    await node.stop()


class Undisturbed:
    """A network on which every message arrives, a millisecond later."""

    def fate(self, message: Message) -> Fate:
        return Fate.DELIVER

    def delay(self) -> float:
        return 0.001

    def notice(self) -> float:
        return 0.0


def test_a_lease_is_renewed_three_times_in_its_time() -> None:
    """So that it outlives a renewal that fails."""

    async def main(loop: VirtualLoop) -> None:
        network = Network(Undisturbed(), trace=lambda line: None)
        node, server = ScriptedPrefill(), Server(Process("node"), network)
        prefill_node_pb2_grpc.add_PrefillNodeServicer_to_server(node, cast(Any, server))
        channel = Channel(network, {"node": server}, Process("router"), "node")
        client = PrefillClient(cast(Any, channel), "node", lease_ttl=30.0, timeout=PATIENCE)
        began = loop.time()
        client.hold("lease")
        for number in (1, 2, 3, 4):
            assert await soon(node.renewed) == ("lease",)
            assert loop.time() - began == pytest.approx(10.0 * number, abs=0.1)
        await client.close()

    run_virtual(main)


def test_a_node_that_does_not_publish_all_blocks_is_waited_for_as_long_as_a_lease_lasts() -> None:
    """By then the lease may be over, which nobody renews while the router hears nothing."""

    async def main(loop: VirtualLoop) -> None:
        network = Network(Undisturbed(), trace=lambda line: None)
        node, server = ScriptedPrefill(), Server(Process("node"), network)
        prefill_node_pb2_grpc.add_PrefillNodeServicer_to_server(node, cast(Any, server))
        channel = Channel(network, {"node": server}, Process("router"), "node")
        client = PrefillClient(cast(Any, channel), "node", lease_ttl=30.0, timeout=PATIENCE)
        events: Events = asyncio.Queue()
        session = client.prefill("one", REQUEST, (), epoch=node.epoch, timeout=100.0, sink=events.put_nowait)
        call = await soon(node.calls)
        assert call.request.timeout_ms == 100_000
        call.accept()
        call.finish(token(7))
        assert [type(await soon(events)) for _ in range(2)] == [PrefillAccepted, PrefillFinished]
        began = loop.time()
        ended = await events.get()
        assert isinstance(ended, PrefillEnded) and isinstance(ended.error, DeadlineError)
        assert loop.time() - began == pytest.approx(30.0, abs=0.1)
        session.close()
        assert await soon(node.released) == "lease"
        await client.close()

    run_virtual(main)


async def test_all_requests_go_by_one_stream_and_each_has_its_events_in_order() -> None:
    async with prefilling() as (node, client, session, events):
        others: Events = asyncio.Queue()
        other = client.prefill("two", REQUEST, (), epoch=node.epoch, timeout=PATIENCE, sink=others.put_nowait)
        one, two = await soon(node.calls), await soon(node.calls)
        assert one.updates is two.updates
        for call in (two, one):
            call.accept(call.request.request_id)
        for num_blocks in (1, 2):
            two.publish(num_blocks)
        two.end()
        one.publish(1)
        assert [await soon(others) for _ in range(4)] == [
            PrefillAccepted(),
            PrefillProgress(1),
            PrefillProgress(2),
            PrefillEnded(None),
        ]
        assert [await soon(events), await soon(events)] == [PrefillAccepted(), PrefillProgress(1)]
        other.close()
        session.close()
        assert [await soon(node.released), await soon(node.released)] == ["two", "one"]


async def test_a_session_that_has_ended_is_forgotten(without_collections: None) -> None:
    """Not when it would have been given up, a minute later."""
    async with prefilling() as (node, client, _, _):
        events: Events = asyncio.Queue()
        session = client.prefill("two", REQUEST, (), epoch=node.epoch, timeout=PATIENCE, sink=events.put_nowait)
        await soon(node.calls)
        call = await soon(node.calls)
        call.accept()
        call.finish(token(7))
        call.end()
        assert [type(await soon(events)) for _ in range(3)] == [PrefillAccepted, PrefillFinished, PrefillEnded]
        session.close()
        forgotten = weakref.ref(session)
        del session
        await until(lambda: forgotten() is None)


async def test_a_request_that_is_given_up_at_once_is_released_behind_it() -> None:
    """Were it the other way round, the node would compute the prompt for nobody."""
    async with prefilling() as (node, _, session, events):
        session.close()
        call = await soon(node.calls)
        assert await soon(node.released) == "one"
        assert call.over.is_set()
        call.accept()
        call.publish(1)
        call.end()
        session.close()
    assert node.released.empty() and events.empty()


async def test_a_stream_that_breaks_ends_its_requests_whose_leases_are_released_by_the_next_one() -> None:
    async with prefilling() as (node, client, session, events):
        call = await soon(node.calls)
        call.accept()
        assert await soon(events) == PrefillAccepted()
        client.lose(UnavailableError("it is silent"))
        ended = events.get_nowait()
        assert isinstance(ended, PrefillEnded) and "it is silent" in str(ended.error)
        async with asyncio.timeout(PATIENCE):
            await call.over.wait()
        session.close()
        assert await soon(node.released) == "lease"
        client.prefill("two", REQUEST, (), epoch=node.epoch, timeout=PATIENCE, sink=events.put_nowait).close()
        assert (await soon(node.calls)).updates is not call.updates


async def test_a_stream_that_fails_unforeseen_ends_its_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits for them would otherwise wait until the requests' time is over."""

    def fail(message: object) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr("router.relay.prefill_client._event_from_wire", fail)
    async with prefilling() as (node, _, session, events):
        call = await soon(node.calls)
        call.accept()
        ended = await soon(events)
        assert isinstance(ended, PrefillEnded) and isinstance(ended.error, UnavailableError)
        assert session.has_ended
        session.close()
        assert await soon(node.released) == "lease"
    assert "a fault of ours" in caplog.text


class GarblingPrefill(ScriptedPrefill):
    """A node that sends what is no event of a prefill node when it publishes blocks."""

    def attach(self, server: grpc.aio.Server) -> None:
        super().attach(server)
        method = grpc.stream_stream_rpc_method_handler(
            self._serve, prefill_node_pb2.PrefillCommands.FromString, response_serializer=bytes
        )
        server.add_registered_method_handlers("kvrelay.v1.PrefillNode", {"Serve": method})

    async def _serve(
        self, commands: AsyncIterator[prefill_node_pb2.PrefillCommands], context: object
    ) -> AsyncIterator[bytes]:
        async for update in self.Serve(commands, context):
            yield b"\xff" if update.events[0].HasField("progress") else update.SerializeToString()


async def test_an_event_that_is_not_understood_is_no_end_by_which_all_blocks_are_published() -> None:
    async with prefilling(GarblingPrefill) as (node, _, session, events):
        call = await soon(node.calls)
        call.accept()
        call.publish(1)
        assert await soon(events) == PrefillAccepted()
        ended = await soon(events)
        assert isinstance(ended, PrefillEnded) and isinstance(ended.error, UnavailableError)
        assert "is not understood" in str(ended.error)
        session.close()
