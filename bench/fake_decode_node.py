"""A decode node without an engine: prompts and tokens take it no time, so that only the router remains to be measured.

It is a process (`python -m bench.fake_decode_node --vocab-size N`) that prints its address and ends with its standard
input. The first token of a request comes at once; then every step sends a token for each request, as an engine's would:
in one message or a few, with those of earlier steps for which the router had no time yet.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from bench.arguments import script_parser
from decode_node.router_stream import RouterStream
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.node_report import PROTOCOL
from kvrelay.core.process.lifecycle import on_stdin_closed
from kvrelay.core.rpc.connections import serve_insecure, server_options
from kvrelay.v1 import common_pb2, decode_node_pb2, decode_node_pb2_grpc, node_pb2, node_pb2_grpc

BLOCK_SIZE = 16
# Every byte-level vocabulary decodes these ids to something short.
FIRST_ID, NUM_IDS = 65, 26
_HEARTBEAT_SECONDS = 1.0


class FakeNode(node_pb2_grpc.NodeServicer):
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    async def Describe(self, request: node_pb2.DescribeRequest, context: Any) -> node_pb2.DescribeResponse:
        namespace = node_pb2.KVNamespace(
            model_fingerprint=b"\x01" * 32, kv_dtype="bfloat16", layout_id="fake", block_size=BLOCK_SIZE
        )
        return node_pb2.DescribeResponse(
            role=node_pb2.NODE_ROLE_DECODE,
            source=common_pb2.KVSource(node_id="fake-0", epoch=1, endpoint="nowhere"),
            kv_namespace=namespace,
            connector="in_process",
            max_model_len=131_072,
            vocab_size=self._vocab_size,
            max_num_seqs=4096,
            protocol=PROTOCOL,
        )

    async def Watch(self, request: node_pb2.WatchRequest, context: Any) -> AsyncIterator[node_pb2.WatchResponse]:
        load = node_pb2.NodeLoad(num_free_blocks=1 << 20, num_blocks=1 << 20)
        yield node_pb2.WatchResponse(epoch=1, reset=True, load=load)
        while True:  # a node that is silent counts as lost
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            yield node_pb2.WatchResponse(epoch=1, load=load)

    async def Distrust(self, request: node_pb2.DistrustRequest, context: Any) -> node_pb2.DistrustResponse:
        return node_pb2.DistrustResponse()  # it has no blocks


class FakeDecode(decode_node_pb2_grpc.DecodeNodeServicer):
    """A decode service that makes one token of every running request every `step` seconds."""

    def __init__(self, step: float) -> None:
        self._step = step

    async def Serve(
        self, request_iterator: AsyncIterator[decode_node_pb2.DecodeCommand], context: Any
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
        self._due: float | None = None  # when the next step is, in loop time; None without requests

    async def run(self, commands: AsyncIterator[decode_node_pb2.DecodeCommand]) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "admit":
                    self._admit(command.admit.request_id, command.admit.sampling_params.max_tokens)
                case "abort":
                    if command.abort.request_id in self._left:
                        self._end(command.abort.request_id)

    def close(self) -> None:
        self._left.clear()

    def _admit(self, request_id: str, num_tokens: int) -> None:
        self._left[request_id] = num_tokens
        self.stream.begin(request_id)
        computed = decode_node_pb2.PromptComputed()
        self.stream.send(decode_node_pb2.DecodeEvent(request_id=request_id, prompt_computed=computed))
        self._add_token(request_id)
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


async def serve(vocab_size: int, step: float) -> None:
    server = grpc.aio.server(options=server_options())
    node_pb2_grpc.add_NodeServicer_to_server(FakeNode(vocab_size), server)
    decode_node_pb2_grpc.add_DecodeNodeServicer_to_server(FakeDecode(step), server)
    port = await serve_insecure(server, "127.0.0.1", 0)
    print(f"127.0.0.1:{port}", flush=True)
    ended = asyncio.Event()
    on_stdin_closed(ended.set)
    await ended.wait()
    await server.stop(None)


if __name__ == "__main__":
    parser = script_parser(__file__, __doc__)
    parser.add_argument("--vocab-size", type=int, required=True, help="vocabulary size that the node reports")
    parser.add_argument("--step-ms", type=float, default=2.0, help="milliseconds between tokens of a request")
    options = parser.parse_args(sys.argv[1:])
    asyncio.run(serve(options.vocab_size, options.step_ms / 1e3))
