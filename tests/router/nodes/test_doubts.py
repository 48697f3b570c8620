"""A node that has refused blocks says so with its changes, and the router tells their holder, over real gRPC."""

import logging

import pytest

from kvrelay.core.errors import UnavailableError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import RefusedBlock
from kvrelay.core.rpc.wire import refused_to_wire
from kvrelay.v1 import node_pb2
from tests.router.scripted_cluster import registered, settled
from tests.router.scripted_nodes import ScriptedDecode, ScriptedNode, ScriptedPrefill, soon, until

A, B = (BlockHash(bytes([number]) * 32) for number in range(2))


def refuse(reader: ScriptedNode, holder: ScriptedNode, name: BlockHash, *, epoch: int = 1) -> None:
    refused = RefusedBlock(KVSource(holder.node_id, epoch, holder.endpoint), name)
    reader.updates.put_nowait(node_pb2.WatchResponse(epoch=1, refused=[refused_to_wire(refused)]))


async def test_the_process_that_holds_refused_blocks_is_told_and_nobody_else() -> None:
    prefill, other, decode = ScriptedPrefill(), ScriptedPrefill("prefill-1"), ScriptedDecode()
    async with registered(prefill, other, decode) as registry:
        await settled(registry)
        refuse(decode, prefill, B, epoch=9)  # of a process that has ended
        refuse(decode, prefill, A)
        request = await soon(prefill.distrust_requests)
        assert (request.epoch, request.name) == (1, A)
        refuse(prefill, decode, B)
        assert (await soon(decode.distrust_requests)).name == B
        assert prefill.distrust_requests.empty() and other.distrust_requests.empty()


async def test_a_node_that_has_never_answered_keeps_no_other_from_being_told() -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with registered(prefill, decode, late=ScriptedPrefill("late")) as registry:
        await until(lambda: sum(node.is_watched for node in registry.nodes) == 2)
        refuse(prefill, decode, A)
        assert (await soon(decode.distrust_requests)).name == A


class DeafPrefill(ScriptedPrefill):
    """A node that cannot be told."""

    async def Distrust(self, request: node_pb2.DistrustRequest, context: object) -> node_pb2.DistrustResponse:
        raise UnavailableError("deaf")


async def test_a_holder_that_cannot_be_told_is_logged_and_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = DeafPrefill(), ScriptedDecode()
    async with registered(prefill, decode) as registry:
        await settled(registry)
        with caplog.at_level(logging.WARNING):
            refuse(decode, prefill, A)
            await until(lambda: "was not told of a damaged block" in caplog.text)
        decode.update(1, stored=[A])
        await until(lambda: registry.index.leading([A]) == {"decode-0": 1})
