"""A router that stops while clients still take answers whose requests have ended."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.v1 import decode_node_pb2, router_pb2, router_pb2_grpc
from tests.chaos.proxy import Proxy
from tests.router.scripted_nodes import PATIENCE
from tests.router.served import Served, served

LEAST_GRACE_SECONDS = 1.0  # which clients have in any case
NUM_TOKENS = 1_000_000  # whose text is more than the system keeps for a connection
CAPITAL = 315  # a token of eight characters
# So that little of an answer over gRPC is on its way at a time.
SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65535),
    ("grpc.max_receive_message_length", -1),
]
BODY = json.dumps({"prompt": [1, 2], "max_tokens": NUM_TOKENS}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"


@asynccontextmanager
async def answering(router: Served) -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """Asks over HTTP for a large answer. Yields what reads it, from behind its head, and how many bytes it has."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
    client.connect((router.http.base_url.host, router.http.base_url.port))
    reader, writer = await asyncio.open_connection(sock=client)
    writer.write(POST % (len(BODY), BODY))
    end_request(router, await router.decode.admit())
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200")
    try:
        yield reader, int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
    finally:
        writer.close()


def end_request(router: Served, admit: decode_node_pb2.Admit) -> None:
    output = TokenOutput(0, (CAPITAL,) * NUM_TOKENS, finish_reason=FinishReason.LENGTH)
    router.decode.tokens(admit.request_id, output)


async def no_request_runs(router: Served) -> None:
    while not re.search(
        r"^kvrelay:num_requests_running\S* 0.0$", (await router.http.get("/metrics")).text, re.MULTILINE
    ):
        await asyncio.sleep(0.01)


async def lasts(stopping: "asyncio.Task[None]") -> bool:
    """Tells whether a stop takes longer than clients have in any case."""
    await asyncio.wait({stopping}, timeout=2 * LEAST_GRACE_SECONDS)
    return not stopping.done()


async def test_a_client_has_the_stop_timeout_for_a_whole_answer(tokenizer_directory: Path) -> None:
    """Another one, whose connection is idle, is not waited for."""
    async with served(tokenizer_directory, stop_timeout=3600.0) as router, asyncio.timeout(PATIENCE):
        async with answering(router) as (reader, num_bytes):
            await no_request_runs(router)  # asked over the idle connection
            stopping = asyncio.create_task(router.router.aclose())
            assert await lasts(stopping)
            assert len(await reader.readexactly(num_bytes)) == num_bytes
        await stopping


async def test_so_has_one_over_grpc_and_a_watch_of_the_health_ends(tokenizer_directory: Path) -> None:
    async with served(tokenizer_directory, stop_timeout=3600.0) as router, asyncio.timeout(PATIENCE):
        proxy = Proxy(int(router.grpc_address.rpartition(":")[2]))
        await proxy.start()
        async with (
            grpc.aio.insecure_channel(proxy.address, options=SMALL_WINDOW) as slow,
            grpc.aio.insecure_channel(router.grpc_address) as other,
        ):
            health: Any = health_pb2_grpc.HealthStub(other)
            watch = health.Watch(health_pb2.HealthCheckRequest(service="kvrelay.v1.Router"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stub: Any = router_pb2_grpc.RouterStub(slow)
            generating = stub.Generate(router_pb2.GenerateRequest(prompt="hello", max_tokens=NUM_TOKENS))
            admit = await router.decode.admit()
            proxy.silence()
            end_request(router, admit)
            await no_request_runs(router)
            stopping = asyncio.create_task(router.router.aclose())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await lasts(stopping)
            proxy.speak()
            assert len((await generating).outputs[0].token_ids) == NUM_TOKENS
            await stopping
        await proxy.close()


async def test_a_second_signal_ends_the_wait_for_a_client_that_takes_its_answer(tokenizer_directory: Path) -> None:
    async with served(tokenizer_directory, stop_timeout=3600.0) as router, asyncio.timeout(PATIENCE):
        async with answering(router) as (reader, num_bytes):
            stopping = asyncio.create_task(router.router.aclose())
            assert await lasts(stopping)
            router.hurry.set()
            await stopping
            assert len(await reader.read(-1)) < num_bytes
