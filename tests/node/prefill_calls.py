"""Calls of a prefill service, without a router."""

from collections.abc import AsyncGenerator, Sequence
from typing import cast

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.rpc.calls import Context
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


def prefill(
    service: PrefillService, request_id: str, prompt: Sequence[int] = PROMPT
) -> AsyncGenerator[pb.PrefillEvent, None]:
    return service.Prefill(prefill_request(request_id, prompt), NO_CONTEXT)


async def release(service: PrefillService, *lease_ids: str) -> None:
    await service.ReleaseLeases(pb.ReleaseLeasesRequest(lease_ids=lease_ids), NO_CONTEXT)
