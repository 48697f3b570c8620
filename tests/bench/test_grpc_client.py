"""What came of an answer over gRPC before it failed or was cut off."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from kvrelay.bench.base import Answer, Generation
from kvrelay.bench.grpc_client import GrpcClient
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.errors import KVError
from kvrelay.core.generation.outputs import TokenOutput
from router.request import RequestEvent, RoutedRequest
from tests.bench.servers import grpc_router
from tests.router.conftest import relay, tokenizer, tokenizer_directory
from tests.router.edge.edge_parts import ScriptedRelay

__all__ = ["relay", "tokenizer", "tokenizer_directory"]  # fixtures


@dataclass
class SeveralRelay(ScriptedRelay):
    """A relay that answers three tokens in one event, and fails when it is told to."""

    def __post_init__(self) -> None:
        self.fails = asyncio.Event()

    async def run(self, request: RoutedRequest) -> AsyncGenerator[RequestEvent, None]:
        yield TokenOutput(0, (5, 6, 7), (), None, None)
        await self.fails.wait()
        raise KVError("lost its block")


async def test_every_token_of_an_answer_that_does_not_end_is_counted(relay: ScriptedRelay) -> None:
    several = SeveralRelay(relay.tokenizer)
    async with grpc_router(several) as url:
        client = GrpcClient(url.removeprefix("grpc://"), Generation(0.0, True, timeout=20.0), MonotonicClock())
        await client.resolve_model("")
        send = await client.prepare((1, 2), 9)
        failed, cut = Answer(), Answer()
        for answer in (failed, cut):
            sending = asyncio.ensure_future(send(answer))
            while not answer.arrivals:
                await asyncio.sleep(0)
            if answer is failed:
                several.fails.set()
                await sending
                several.fails.clear()
            sending.cancel()
            await asyncio.wait({sending})
        await client.close()
    assert failed.failure is not None and cut.finished is None
    assert [(answer.num_tokens, len(answer.arrivals)) for answer in (failed, cut)] == [(3, 1)] * 2
