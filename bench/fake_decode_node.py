"""A decode node without an engine: prompts and tokens take it no time, so that only the router remains to be measured.

It is a process (`python -m bench.fake_decode_node --vocab-size N`) that prints its address and ends with its standard
input. The first token of a request comes at once; then every step sends one message with a token for each request, as
an engine's would.
"""

import asyncio
import math
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from bench.arguments import script_parser
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
        left: dict[str, int] = {}  # output tokens to come, by request
        fresh: list[str] = []
        wake = asyncio.Event()

        async def read() -> None:
            async for command in request_iterator:
                match command.WhichOneof("command"):
                    case "admit":
                        left[command.admit.request_id] = command.admit.sampling_params.max_tokens
                        fresh.append(command.admit.request_id)
                    case "abort":
                        left.pop(command.abort.request_id, None)
                wake.set()

        reader = asyncio.create_task(read())
        now = asyncio.get_running_loop().time
        due = math.inf  # when the next step is; what is sent in between does not put it off
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(due if left else None):
                        await wake.wait()
                wake.clear()
                is_due = now() >= due
                update = decode_node_pb2.DecodeUpdate()
                for request_id in fresh:
                    update.events.add(request_id=request_id).prompt_computed.num_cached_tokens = 0
                for request_id in list(left) if is_due else fresh:
                    if request_id in left:
                        _add_token(update, request_id, left)
                fresh.clear()
                if not left:
                    due = math.inf
                elif is_due:
                    due += self._step
                else:
                    due = min(due, now() + self._step)
                if update.events:
                    yield update
        finally:
            reader.cancel()


def _add_token(update: decode_node_pb2.DecodeUpdate, request_id: str, left: dict[str, int]) -> None:
    left[request_id] -= 1
    tokens = update.events.add(request_id=request_id).tokens
    tokens.token_ids.append(FIRST_ID + left[request_id] % NUM_IDS)
    tokens.stop_token_id = -1
    if left[request_id] == 0:
        tokens.finish_reason = common_pb2.FINISH_REASON_LENGTH
        del left[request_id]


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
