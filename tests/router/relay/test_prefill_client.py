"""The router's streams from a prefill node, without the rest of the router."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from kvrelay.core.errors import DeadlineError, UnavailableError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.rpc.calls import Context
from kvrelay.v1 import prefill_node_pb2, prefill_node_pb2_grpc
from router.relay.prefill_client import PrefillAccepted, PrefillClient, PrefillEnded, PrefillEvent, PrefillSession
from router.request import NodeRequest
from tests.router.scripted_nodes import NAMESPACE, PATIENCE, ScriptedPrefill, soon, token
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
        client = PrefillClient(channel, node.address, lease_ttl=10.0, timeout=PATIENCE)
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


class SilentPrefill(ScriptedPrefill):
    """A node that answers no request."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[prefill_node_pb2.PrefillRequest] = []

    async def Prefill(
        self, request: prefill_node_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_node_pb2.PrefillEvent]:
        self.requests.append(request)
        await asyncio.Event().wait()
        yield prefill_node_pb2.PrefillEvent()


def test_a_call_ends_a_second_after_the_time_of_its_request() -> None:
    """By then the client has heard what the request has waited for; gRPC would only say that its deadline is over."""

    async def main(loop: VirtualLoop) -> None:
        network = Network(Undisturbed(), trace=lambda line: None)
        node, server = SilentPrefill(), Server(Process("node"), network)
        prefill_node_pb2_grpc.add_PrefillNodeServicer_to_server(node, cast(Any, server))
        channel = Channel(network, {"node": server}, Process("router"), "node")
        client = PrefillClient(cast(Any, channel), "node", lease_ttl=30.0, timeout=PATIENCE)
        events: Events = asyncio.Queue()
        began = loop.time()
        client.prefill("one", REQUEST, (), epoch=node.epoch, timeout=10.0, sink=events.put_nowait)
        ended = await soon(events)
        assert isinstance(ended, PrefillEnded) and isinstance(ended.error, DeadlineError)
        assert loop.time() - began == pytest.approx(11.0, abs=0.1)
        await client.close()
        assert [request.timeout_ms for request in node.requests] == [10_000], "the node is told the request's own time"

    run_virtual(main)


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


async def test_a_stream_that_fails_unforeseen_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits for it would otherwise wait until the request's time is over."""

    def fail(message: object) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr("router.relay.prefill_client._finished_from_wire", fail)
    async with prefilling() as (node, _, session, events):
        call = await soon(node.calls)
        call.accept()
        call.finish(token(7))
        assert await soon(events) == PrefillAccepted()
        ended = await soon(events)
        assert isinstance(ended, PrefillEnded) and str(ended.error) == "internal error"
        assert session.has_ended and "a fault of ours" in caplog.text
        session.close()
        assert await soon(node.released) == ("lease",)


class GarblingPrefill(ScriptedPrefill):
    """A node that sends what is no event of a prefill node when it publishes blocks."""

    def attach(self, server: grpc.aio.Server) -> None:
        super().attach(server)
        method = grpc.unary_stream_rpc_method_handler(
            self._prefill, prefill_node_pb2.PrefillRequest.FromString, response_serializer=bytes
        )
        server.add_registered_method_handlers("kvrelay.v1.PrefillNode", {"Prefill": method})

    async def _prefill(self, request: prefill_node_pb2.PrefillRequest, context: Context) -> AsyncIterator[bytes]:
        async for event in self.Prefill(request, context):
            yield b"\xff" if event.HasField("progress") else event.SerializeToString()


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
