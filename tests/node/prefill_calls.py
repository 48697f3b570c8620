"""Requests to a prefill service, each by a stream of its own, without a router."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from kvrelay.core.errors import UnavailableError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.rpc.calls import Context
from kvrelay.core.rpc.errors import error_from_status
from kvrelay.core.rpc.wire import sampling_to_wire
from kvrelay.v1 import prefill_node_pb2 as pb
from prefill_node.service import PrefillService
from tests.node.fake_node import EPOCH

PROMPT = list(range(100, 120))
NO_CONTEXT = cast(Context, None)  # the service reads nothing from it
PATIENCE = 10.0


def prefill_request(request_id: str, prompt: Sequence[int]) -> pb.PrefillRequest:
    sampling = sampling_to_wire(SamplingParams(max_tokens=3, temperature=0.0, seed=0))
    return pb.PrefillRequest(
        request_id=request_id,
        epoch=EPOCH,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        lease_ttl_ms=60_000,
    )


def prefill_command(request_id: str, prompt: Sequence[int] = PROMPT) -> pb.PrefillCommand:
    return pb.PrefillCommand(prefill=prefill_request(request_id, prompt))


def prefill(
    service: PrefillService, request_id: str, prompt: Sequence[int] = PROMPT
) -> AsyncGenerator[pb.PrefillEvent, None]:
    return run(service, prefill_request(request_id, prompt))


async def run(service: PrefillService, request: pb.PrefillRequest) -> AsyncGenerator[pb.PrefillEvent, None]:
    """Yields the events of a request but for the last. Raises its error, and UnavailableError if the node ends the
    stream before the request. When closed, ends the stream."""

    async def commands() -> AsyncIterator[pb.PrefillCommands]:
        yield pb.PrefillCommands(commands=[pb.PrefillCommand(prefill=request)])
        await asyncio.Event().wait()

    async with aclosing(cast(Any, service.Serve(commands(), NO_CONTEXT))) as updates:
        async for update in updates:
            for event in update.events:
                if event.HasField("ended"):
                    return
                if event.HasField("failed"):
                    raise error_from_status(event.failed.status)
                yield event
    raise UnavailableError("the stream has ended")


def release_command(request_id: str) -> pb.PrefillCommand:
    return pb.PrefillCommand(release=pb.Release(request_id=request_id))


async def release(service: PrefillService, *request_ids: str) -> None:
    async def commands() -> AsyncIterator[pb.PrefillCommands]:
        yield pb.PrefillCommands(commands=map(release_command, request_ids))

    async for _ in service.Serve(commands(), NO_CONTEXT):
        raise AssertionError("a release has no answer")
