"""Requests from the wire to the engine's values, and what nodes report back, for both node kinds."""

from collections.abc import Iterable

from kv_connector.base import FetchOutcome, Source
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.wire import sampling_from_wire
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.node.ladder import FetchReport
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
    num_prior_output_tokens: int = 0,
    first_choice_index: int = 0,
) -> EngineRequest:
    """Routers validate; a node still does not let a request that could hurt others past its own edge."""
    given = tuple(prompt_token_ids)
    if not request_id:
        raise InvalidRequestError("request_id is empty", field="request_id")
    if given and max(given) >= vocab_size:
        raise InvalidRequestError(f"token id {max(given)} is outside the vocabulary of {vocab_size}", field="prompt")
    sampling = sampling_from_wire(sampling_params)
    sampling.validate(vocab_size=vocab_size)
    if num_prior_output_tokens >= len(given) > 0:
        raise InvalidRequestError("there is no prompt before the prior output tokens", field="num_prior_output_tokens")
    if num_prior_output_tokens >= sampling.max_tokens:
        raise InvalidRequestError("max_tokens is reached already", field="num_prior_output_tokens")
    if num_prior_output_tokens > 0 and sampling.n != 1:
        raise InvalidRequestError("with prior output tokens n must be 1", field="n")
    num_prompt_tokens = len(given) - num_prior_output_tokens
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=given[:num_prompt_tokens],
        sampling=sampling,
        priority=priority,
        cache_salt=cache_salt,
        role=role,
        receive=receive,
        prior_output_token_ids=given[num_prompt_tokens:],
        first_choice_index=first_choice_index,
    )


def source_from_wire(message: common_pb2.KVSource) -> Source:
    return Source(node_id=message.node_id, epoch=message.epoch, endpoint=message.endpoint)


def report_to_wire(report: FetchReport) -> common_pb2.FetchReport:
    in_vain = dict(report.in_vain)
    return common_pb2.FetchReport(
        fetched=[common_pb2.FetchedBlocks(node_id=node_id, num_blocks=count) for node_id, count in report.fetched],
        num_missing=in_vain.get(FetchOutcome.MISSING, 0),
        num_refused=in_vain.get(FetchOutcome.REFUSED, 0),
        num_failed=in_vain.get(FetchOutcome.FAILED, 0),
    )
