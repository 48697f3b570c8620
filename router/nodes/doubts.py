"""Tells a node that another one has refused blocks of it. Its own prompts would find a damaged block, too: what it
computes behind such a block is wrong, and has a digest that matches.

Nothing waits for that: a holder that is not told is told again when the next copy is refused.
"""

import asyncio
from collections.abc import Iterable
from typing import cast

import grpc

from kvrelay.core.node_report import RefusedBlock
from kvrelay.core.tasks import begin_task, end_tasks
from kvrelay.v1 import node_pb2, node_pb2_grpc
from router.nodes.node import NodeHandle

_OUTAGE = "telling a node which blocks to distrust"


class Doubts:
    """The messages under way. `timeout`: seconds that one may take."""

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, refused: RefusedBlock, nodes: Iterable[NodeHandle]) -> None:
        """Tells the holder of the block, if it is one of `nodes` and still the same process."""
        holder = refused.holder
        for node in nodes:
            if node.is_watched and (node.source.node_id, node.source.epoch) == (holder.node_id, holder.epoch):
                task = begin_task(self._tell(node, refused), name=f"doubt of a block of {node.address}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await end_tasks(*self._tasks)

    async def _tell(self, node: NodeHandle, refused: RefusedBlock) -> None:
        stub = cast("node_pb2_grpc.NodeAsyncStub", node_pb2_grpc.NodeStub(node.channel))
        request = node_pb2.DistrustRequest(epoch=refused.holder.epoch, name=refused.name)
        try:
            await stub.Distrust(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            node.outages.failed(_OUTAGE, "%s was not told of a damaged block: %s", node.name, error.details())
        else:
            node.outages.succeeded(_OUTAGE)
