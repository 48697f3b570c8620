"""Requests from the wire to the engine's values, for both node kinds."""

from collections.abc import Iterable

from kv_connector.base import Source
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.wire import sampling_from_wire
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.v1 import common_pb2


def engine_request(
    request_id: str,
    prompt_token_ids: Iterable[int],
    sampling_params: common_pb2.SamplingParams,
    *,
    vocab_size: int,
    priority: int,
    cache_salt: bytes,
    role: KVRole,
    receive: bool = False,
) -> EngineRequest:
    """Routers validate; a node still does not let a request that could hurt others past its own edge."""
    prompt = tuple(prompt_token_ids)
    if not request_id:
        raise InvalidRequestError("request_id is empty", field="request_id")
    if prompt and max(prompt) >= vocab_size:
        raise InvalidRequestError(f"token id {max(prompt)} is outside the vocabulary of {vocab_size}", field="prompt")
    sampling = sampling_from_wire(sampling_params)
    sampling.validate(vocab_size=vocab_size)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        priority=priority,
        cache_salt=cache_salt,
        role=role,
        receive=receive,
    )


def source_from_wire(message: common_pb2.KVSource) -> Source:
    return Source(node_id=message.node_id, epoch=message.epoch, endpoint=message.endpoint)
