"""Requests from the wire to the engine's values, and what nodes report back, for both node kinds."""

from kv_connector.base import FetchOutcome
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.wire import sampling_from_wire
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.node.ladder import FetchReport
from kvrelay.v1 import common_pb2, decode_node_pb2, prefill_node_pb2


def engine_request(
    asked: decode_node_pb2.Admit | prefill_node_pb2.PrefillRequest, role: KVRole, *, vocab_size: int, has_store: bool
) -> EngineRequest:
    """Converts a request. The router has validated it; this rejects what could harm other requests on the node.
    `has_store`: the node's connector reaches a store that all nodes share. Raises InvalidRequestError naming the
    field."""
    given = tuple(asked.prompt_token_ids)
    if not asked.request_id:
        raise InvalidRequestError("request_id is empty", field="request_id")
    if given and max(given) >= vocab_size:
        raise InvalidRequestError(f"token id {max(given)} is outside the vocabulary of {vocab_size}", field="prompt")
    sampling = sampling_from_wire(asked.sampling_params)
    sampling.validate(vocab_size=vocab_size)
    num_prior = asked.num_prior_output_tokens
    if num_prior >= len(given) > 0:
        raise InvalidRequestError("there is no prompt before the prior output tokens", field="num_prior_output_tokens")
    if num_prior >= sampling.max_tokens:
        raise InvalidRequestError("max_tokens is reached already", field="num_prior_output_tokens")
    if num_prior > 0 and sampling.n != 1:
        raise InvalidRequestError("with prior output tokens n must be 1", field="n")
    # A prompt whose log-probabilities are wanted is computed whole.
    may_fetch = (bool(asked.sources) or has_store) and sampling.prompt_logprobs is None
    num_prompt_tokens = len(given) - num_prior
    return EngineRequest(
        request_id=asked.request_id,
        prompt_token_ids=given[:num_prompt_tokens],
        sampling=sampling,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        role=role,
        receive=role is KVRole.CONSUME or may_fetch,
        prior_output_token_ids=given[num_prompt_tokens:],
        first_choice_index=asked.first_choice_index,
    )


def report_to_wire(report: FetchReport) -> common_pb2.FetchReport:
    failures = dict(report.failures)
    return common_pb2.FetchReport(
        fetched=[common_pb2.FetchedBlocks(node_id=node_id, num_blocks=count) for node_id, count in report.fetched],
        num_missing=failures.get(FetchOutcome.MISSING, 0),
        num_refused=failures.get(FetchOutcome.REFUSED, 0),
        num_failed=failures.get(FetchOutcome.FAILED, 0),
    )
