"""The router's stream to a decode node, without the rest of the router."""

import asyncio

import grpc

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
