"""The router's stream to a decode node, without the rest of the router."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from kvrelay.core.errors import UnavailableError
from kvrelay.v1 import decode_node_pb2
from router.relay.decode_client import DecodeClient, DecodeEvent, DecodeFailed
from tests.router.scripted_nodes import PATIENCE, ScriptedDecode, soon


def who_waits_for_commands() -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task.get_coro())]


async def test_the_end_of_a_stream_fails_its_sessions() -> None:
    node = ScriptedDecode()
    await node.start()
    async with grpc.aio.insecure_channel(node.address) as channel:
        client = DecodeClient(channel, node.address)
        events: asyncio.Queue[DecodeEvent] = asyncio.Queue()
        session = client.open("one", events.put_nowait)
        assert who_waits_for_commands()
        node.end_stream()
        last: DecodeEvent = await soon(events)
        assert isinstance(last, DecodeFailed)
        async with asyncio.timeout(PATIENCE):
            while who_waits_for_commands():
                await asyncio.sleep(0)
        session.close(finished=False)
        await client.close()
    await node.stop()


class WatchedDecode(ScriptedDecode):
    """A node that notes when a stream has begun and when it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: asyncio.Queue[str] = asyncio.Queue()

    async def Serve(
        self, request_iterator: AsyncIterator[decode_node_pb2.DecodeCommand], context: object
    ) -> AsyncIterator[decode_node_pb2.DecodeUpdate]:
        self.streams.put_nowait("begun")
        try:
            async for update in super().Serve(request_iterator, context):
                yield update
        finally:
            self.streams.put_nowait("ended")


async def test_a_node_that_is_lost_fails_its_sessions_at_once_and_finds_its_stream_ended() -> None:
    node = WatchedDecode()
    await node.start()
    async with grpc.aio.insecure_channel(node.address) as channel:
        client = DecodeClient(channel, node.address)
        events: asyncio.Queue[DecodeEvent] = asyncio.Queue()
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
    await node.stop()
