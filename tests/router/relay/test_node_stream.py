"""The commands of a router's stream to a node: how they travel."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.v1 import decode_node_pb2
from router.relay.decode_client import DecodeClient, DecodeSession
from router.request import NodeRequest
from tests.router.scripted_nodes import NAMESPACE, ScriptedDecode, soon


class ListeningDecode(ScriptedDecode):
    """A node that takes messages one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: asyncio.Queue[list[str | None]] = asyncio.Queue()  # the kinds of their commands
        self.may_read = asyncio.Event()

    async def Serve(
        self, request_iterator: AsyncIterator[decode_node_pb2.DecodeCommands], context: object
    ) -> AsyncIterator[decode_node_pb2.DecodeUpdate]:
        yield decode_node_pb2.DecodeUpdate()
        await self.may_read.wait()
        async for message in request_iterator:
            self.messages.put_nowait([command.WhichOneof("command") for command in message.commands])


def admit(session: DecodeSession, num_tokens: int) -> None:
    request = NodeRequest((5,) * num_tokens, SamplingParams(seed=1), NAMESPACE, 0, b"", 0, 0, is_replay=False)
    session.admit(request, epoch=1, local_prefill=True, yields_to_decodes=False, timeout=10.0, sources=())


async def test_commands_of_one_turn_travel_together_in_their_order_and_many_in_some_messages() -> None:
    node = ListeningDecode()
    node.may_read.set()
    await node.start()
    async with grpc.aio.insecure_channel(node.address) as channel:
        client = DecodeClient(channel, node.address)
        session = client.open("one", lambda event: None)
        admit(session, 3)
        session.pull_no_more()
        session.finish(0)
        assert await soon(node.messages) == ["admit", "pull", "finish"]
        for _ in range(300):
            session.finish(0)
        session.close(finished=False)
        sizes = [await soon(node.messages) for _ in range(3)]
        assert list(map(len, sizes)) == [128, 128, 45] and sizes[2][-1] == "abort"
        await client.close()
    await node.stop()


async def test_commands_that_are_large_do_not_travel_in_one_message() -> None:
    node = ListeningDecode()
    node.may_read.set()
    await node.start()
    async with grpc.aio.insecure_channel(node.address) as channel:
        client = DecodeClient(channel, node.address)
        for name in ("a", "b", "c"):
            admit(client.open(name, lambda event: None), 1_500_000)  # a byte for each token
        assert [await soon(node.messages), await soon(node.messages)] == [["admit", "admit"], ["admit"]]
        await client.close()
    await node.stop()


async def test_commands_that_wait_for_a_node_that_does_not_read_leave_when_it_does() -> None:
    """And those that came meanwhile travel together."""
    node = ListeningDecode()
    await node.start()
    async with grpc.aio.insecure_channel(node.address) as channel:
        client = DecodeClient(channel, node.address)
        session = client.open("one", lambda event: None)
        for _ in range(8):
            admit(session, 100_000)
            await asyncio.sleep(0)
        session.finish(0)
        node.may_read.set()
        kinds: list[str | None] = []
        while len(kinds) < 9:
            message = await soon(node.messages)
            kinds += message
        assert kinds == ["admit"] * 8 + ["finish"]
        await client.close()
    await node.stop()
