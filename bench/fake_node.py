"""A decode or prefill node without an engine: prompts and tokens take it no time, so that only the router remains to be
measured.

It is a process (`python -m bench.fake_node --role decode --vocab-size N`) that prints its address and ends with its
standard input. The first token of a request comes at once, and the blocks of its prompt are published and fetched at
once; then every step of a decode node sends a token for each request, as an engine's would: in one message or a few,
with those of earlier steps for which the router had no time yet.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from bench.arguments import script_parser
from decode_node.router_stream import RouterStream
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import NodeDescription, NodeRole
from kvrelay.core.process.lifecycle import on_stdin_closed
from kvrelay.core.rpc.connections import serve_insecure, server_options
from kvrelay.core.rpc.wire import description_to_wire, output_to_wire
from kvrelay.v1 import (
    decode_node_pb2,
    decode_node_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    prefill_node_pb2,
    prefill_node_pb2_grpc,
)
from prefill_node import router_stream as prefill_stream

BLOCK_SIZE = 16
# Every byte-level vocabulary decodes these ids to something short.
FIRST_ID, NUM_IDS = 65, 26
_HEARTBEAT_SECONDS = 1.0


class FakeNode(node_pb2_grpc.NodeServicer):
    def __init__(self, role: NodeRole, vocab_size: int) -> None:
        self._role = role
        self._vocab_size = vocab_size

    async def Describe(self, request: node_pb2.DescribeRequest, context: Any) -> node_pb2.DescribeResponse:
        description = NodeDescription(
            role=self._role,
            source=KVSource(f"fake-{self._role.value}", 1, "nowhere"),
            kv_namespace=KVNamespace(b"\x01" * 32, "bfloat16", "fake", BLOCK_SIZE),
            connector="in_process",
            max_model_len=131_072,
            vocab_size=self._vocab_size,
            max_num_seqs=4096,
        )
        return description_to_wire(description)

    async def Watch(self, request: node_pb2.WatchRequest, context: Any) -> AsyncIterator[node_pb2.WatchResponse]:
        load = node_pb2.NodeLoad(num_free_blocks=1 << 20, num_blocks=1 << 20)
        yield node_pb2.WatchResponse(epoch=1, reset=True, load=load)
        while True:  # a node that is silent counts as lost
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            yield node_pb2.WatchResponse(epoch=1, load=load)

    async def Distrust(self, request: node_pb2.DistrustRequest, context: Any) -> node_pb2.DistrustResponse:
        return node_pb2.DistrustResponse()  # it has no blocks


class FakePrefill(prefill_node_pb2_grpc.PrefillNodeServicer):
    async def Serve(
        self, request_iterator: AsyncIterator[prefill_node_pb2.PrefillCommands], context: Any
    ) -> AsyncIterator[prefill_node_pb2.PrefillUpdate]:
        stream = prefill_stream.RouterStream()
        reader = asyncio.create_task(self._run(request_iterator, stream))
        try:
            async for update in stream.updates():
                yield update
        finally:
            reader.cancel()

    async def RenewLeases(
        self, request: prefill_node_pb2.RenewLeasesRequest, context: Any
    ) -> prefill_node_pb2.RenewLeasesResponse:
        return prefill_node_pb2.RenewLeasesResponse()

    async def _run(
        self, messages: AsyncIterator[prefill_node_pb2.PrefillCommands], stream: prefill_stream.RouterStream
    ) -> None:
        async for message in messages:
            for command in message.commands:
                if command.HasField("prefill"):
                    self._prefill(command.prefill, stream)

    def _prefill(self, prefill: prefill_node_pb2.PrefillRequest, stream: prefill_stream.RouterStream) -> None:
        num_blocks = num_blocks_for(len(prefill.prompt_token_ids), BLOCK_SIZE)
        first = output_to_wire(TokenOutput(0, (FIRST_ID,)))
        for event in (
            prefill_node_pb2.PrefillEvent(accepted=prefill_node_pb2.PrefillAccepted()),
            prefill_node_pb2.PrefillEvent(progress=prefill_node_pb2.PrefillProgress(num_published_blocks=num_blocks)),
            prefill_node_pb2.PrefillEvent(finished=prefill_node_pb2.PrefillFinished(first_tokens=[first])),
            prefill_node_pb2.PrefillEvent(ended=prefill_node_pb2.PrefillEnded()),
        ):
            event.request_id = prefill.request_id
            stream.send(event)


class FakeDecode(decode_node_pb2_grpc.DecodeNodeServicer):
    """A decode service that makes one token of every running request every `step` seconds."""

    def __init__(self, step: float) -> None:
        self._step = step

    async def Serve(
        self, request_iterator: AsyncIterator[decode_node_pb2.DecodeCommands], context: Any
    ) -> AsyncIterator[decode_node_pb2.DecodeUpdate]:
        steps = _Steps(RouterStream(), self._step)
        reader = asyncio.create_task(steps.run(request_iterator))
        try:
            async for update in steps.stream.updates():
                yield update
        finally:
            reader.cancel()
            steps.close()


class _Steps:
    """The requests of one router, and the steps that make their tokens for as long as there are any. A step that comes
    late, because the loop was busy, is made up for."""

    def __init__(self, stream: RouterStream, seconds: float) -> None:
        self.stream = stream
        self._seconds = seconds
        self._left: dict[str, int] = {}  # output tokens to come, by request
        self._waiting: dict[str, int] = {}  # the same of requests whose first token comes from elsewhere
        self._due: float | None = None  # when the next step is, in loop time; None without requests

    async def run(self, messages: AsyncIterator[decode_node_pb2.DecodeCommands]) -> None:
        async for message in messages:
            for command in message.commands:
                match command.WhichOneof("command"):
                    case "admit":
                        self._admit(command.admit)
                    case "start":
                        self._start(command.start.request_id)
                    case "abort":
                        if command.abort.request_id in self._left:
                            self._end(command.abort.request_id)
                        elif self._waiting.pop(command.abort.request_id, None) is not None:
                            self.stream.end(command.abort.request_id)

    def close(self) -> None:
        self._left.clear()

    def _admit(self, admit: decode_node_pb2.Admit) -> None:
        self.stream.begin(admit.request_id)
        if admit.local_prefill:
            self._left[admit.request_id] = admit.sampling_params.max_tokens
            computed = decode_node_pb2.PromptComputed()
            self.stream.send(decode_node_pb2.DecodeEvent(request_id=admit.request_id, prompt_computed=computed))
            self._add_token(admit.request_id)
            self._begin_steps()
        else:
            self._waiting[admit.request_id] = admit.sampling_params.max_tokens
            admitted = decode_node_pb2.Admitted()
            self.stream.send(decode_node_pb2.DecodeEvent(request_id=admit.request_id, admitted=admitted))

    def _start(self, request_id: str) -> None:
        ready = decode_node_pb2.KVReady()
        self.stream.send(decode_node_pb2.DecodeEvent(request_id=request_id, kv_ready=ready))
        self._left[request_id] = self._waiting.pop(request_id) - 1
        self._begin_steps()

    def _begin_steps(self) -> None:
        if self._due is None:
            self._wait(asyncio.get_running_loop().time())

    def _step(self, due: float) -> None:
        for request_id in list(self._left):
            self._add_token(request_id)
        self._wait(due)

    def _wait(self, last: float) -> None:
        self._due = last + self._seconds if self._left else None
        if self._due is not None:
            asyncio.get_running_loop().call_at(self._due, self._step, self._due)

    def _add_token(self, request_id: str) -> None:
        self._left[request_id] -= 1
        left = self._left[request_id]
        finish_reason = None if left else FinishReason.LENGTH
        self.stream.send_output(request_id, TokenOutput(0, (FIRST_ID + left % NUM_IDS,), finish_reason=finish_reason))
        if finish_reason is not None:
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        del self._left[request_id]
        self.stream.end(request_id)


async def serve(role: NodeRole, vocab_size: int, step: float) -> None:
    server = grpc.aio.server(options=server_options())
    node_pb2_grpc.add_NodeServicer_to_server(FakeNode(role, vocab_size), server)
    if role is NodeRole.DECODE:
        decode_node_pb2_grpc.add_DecodeNodeServicer_to_server(FakeDecode(step), server)
    else:
        prefill_node_pb2_grpc.add_PrefillNodeServicer_to_server(FakePrefill(), server)
    port = await serve_insecure(server, "127.0.0.1", 0)
    print(f"127.0.0.1:{port}", flush=True)
    ended = asyncio.Event()
    on_stdin_closed(ended.set)
    await ended.wait()
    await server.stop(None)


if __name__ == "__main__":
    parser = script_parser(__file__, __doc__)
    parser.add_argument("--role", type=NodeRole, choices=list(NodeRole), required=True, help="what the node does")
    parser.add_argument("--vocab-size", type=int, required=True, help="vocabulary size that the node reports")
    parser.add_argument("--step-ms", type=float, default=2.0, help="milliseconds between tokens of a request")
    options = parser.parse_args(sys.argv[1:])
    asyncio.run(serve(options.role, options.vocab_size, options.step_ms / 1e3))
