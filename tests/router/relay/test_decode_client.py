"""The router's stream to a decode node, without the rest of the router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from kvrelay.core.errors import UnavailableError
from kvrelay.v1 import decode_node_pb2
from kvrelay.v1.common_pb2 import TokenOutput
from router.relay import node_stream
from router.relay.decode_client import DecodeClient, DecodeEvent, DecodeFailed
from tests.loop_turns import counting_turns
from tests.router.scripted_nodes import PATIENCE, ScriptedDecode, soon


@asynccontextmanager
async def client_of(node: ScriptedDecode) -> AsyncIterator[tuple[DecodeClient, asyncio.Queue[DecodeEvent]]]:
    """Yields a client of the node, which runs meanwhile, and a queue for the events of its sessions."""
    await node.start()
    async with grpc.aio.insecure_channel(node.address) as channel:
        client = DecodeClient(channel, node.address)
        yield client, asyncio.Queue()
        await client.close()
    await node.stop()


def who_waits_for_commands() -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task.get_coro())]


async def test_the_end_of_a_stream_fails_its_sessions() -> None:
    node = ScriptedDecode()
    async with client_of(node) as (client, events):
        session = client.open("one", events.put_nowait)
        assert who_waits_for_commands()
        node.end_stream()
        last: DecodeEvent = await soon(events)
        assert isinstance(last, DecodeFailed)
        async with asyncio.timeout(PATIENCE):
            while who_waits_for_commands():
                await asyncio.sleep(0)
        session.close(finished=False)


class WatchedDecode(ScriptedDecode):
    """A node that notes when a stream has begun and when it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: asyncio.Queue[str] = asyncio.Queue()

    async def Serve(
        self, request_iterator: AsyncIterator[decode_node_pb2.DecodeCommands], context: object
    ) -> AsyncIterator[decode_node_pb2.DecodeUpdate]:
        self.streams.put_nowait("begun")
        try:
            async for update in super().Serve(request_iterator, context):
                yield update
        finally:
            self.streams.put_nowait("ended")


async def test_a_node_that_is_lost_fails_its_sessions_at_once_and_finds_its_stream_ended() -> None:
    node = WatchedDecode()
    async with client_of(node) as (client, events):
        client.open("one", events.put_nowait)
        assert await soon(node.streams) == "begun"
        client.lose(UnavailableError("it is silent"))
        last = events.get_nowait()
        assert isinstance(last, DecodeFailed) and "it is silent" in str(last.error)
        assert await soon(node.streams) == "ended"
        client.open("two", events.put_nowait)
        assert await soon(node.streams) == "begun"
        assert events.empty()
        await client.close()
        assert await soon(node.streams) == "ended"


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_stream_that_is_lost_is_ended_by_its_call_and_what_reads_it_reads_on(has_begun: bool) -> None:
    """If the task that reads were cancelled, gRPC would lose the memory of a message that has just come, or, before the
    task has begun, nothing would end the call."""
    node = WatchedDecode()
    async with client_of(node) as (client, events):
        client.open("one", events.put_nowait)
        stream = client._stream
        assert stream is not None
        if has_begun:
            assert await soon(node.streams) == "begun"
        client.lose(UnavailableError("it is silent"))
        assert cast(Any, stream._call).cancelled() and not stream._task.cancelling()
        await asyncio.wait({stream._task}, timeout=PATIENCE)
        assert stream._task.cancelled()


class GarblingDecode(ScriptedDecode):
    """A node that sends what is no message of a decode node."""

    def attach(self, server: grpc.aio.Server) -> None:
        super().attach(server)
        method = grpc.stream_stream_rpc_method_handler(
            self._serve, decode_node_pb2.DecodeCommands.FromString, response_serializer=bytes
        )
        server.add_registered_method_handlers("kvrelay.v1.DecodeNode", {"Serve": method})

    async def _serve(
        self, commands: AsyncIterator[decode_node_pb2.DecodeCommands], context: object
    ) -> AsyncIterator[bytes]:
        yield b"\xff"
        await asyncio.Event().wait()


async def test_a_message_that_is_not_understood_fails_the_sessions_and_says_so() -> None:
    node = GarblingDecode()
    async with client_of(node) as (client, events):
        client.open("one", events.put_nowait)
        last: DecodeEvent = await soon(events)
        assert isinstance(last, DecodeFailed) and isinstance(last.error, UnavailableError)
        assert f"lost decode node {node.address}: what it answers is not understood" in str(last.error)


class BurstingDecode(ScriptedDecode):
    """A node that has tokens of one request in so many events of one message."""

    NUM_EVENTS = 2000

    async def Serve(
        self, request_iterator: AsyncIterator[decode_node_pb2.DecodeCommands], context: object
    ) -> AsyncIterator[decode_node_pb2.DecodeUpdate]:
        event = decode_node_pb2.DecodeEvent(request_id="one", tokens=TokenOutput(index=0, token_ids=[5]))
        yield decode_node_pb2.DecodeUpdate(events=[event] * self.NUM_EVENTS)
        await asyncio.Event().wait()


async def _turns_of_a_burst() -> int:
    """Returns how many turns of the loop the events of one message take."""
    turns: list[int] = []
    is_over = asyncio.Event()
    async with client_of(BurstingDecode()) as (client, _), counting_turns() as num_turns:

        def sink(event: DecodeEvent) -> None:
            turns.append(num_turns())
            if len(turns) == BurstingDecode.NUM_EVENTS:
                is_over.set()

        client.open("one", sink)
        await asyncio.wait_for(is_over.wait(), PATIENCE)
    return len(set(turns))


async def test_others_have_their_turn_between_the_events_of_a_message() -> None:
    """Else a new request waits until a thousand streams have been written to."""
    assert await _turns_of_a_burst() > 5


async def test_the_longer_others_take_the_more_events_have_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else streams would stand still while very many requests are refused."""
    monkeypatch.setattr(node_stream, "_EVENTS_PER_SECOND", 1e12)
    assert await _turns_of_a_burst() <= 20, "of 128 events, all but the first"
