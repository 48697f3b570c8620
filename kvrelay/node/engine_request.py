"""A router's request as one of the engine: converted and checked, for both kinds of node."""

from dataclasses import replace

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.sampling_params import MAX_N
from kvrelay.core.generation.token_ids import check_token_ids
from kvrelay.core.model.limits import room_for_output
from kvrelay.core.rpc.wire import sampling_from_wire
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.v1 import decode_node_pb2, prefill_node_pb2


def engine_request_from_wire(
    message: decode_node_pb2.Admit | prefill_node_pb2.PrefillRequest,
    role: KVRole,
    *,
    vocab_size: int,
    max_model_len: int,
    has_store: bool,
) -> EngineRequest:
    """Converts a request and checks it once more, although routers validate, so that none can harm the node's other
    requests or ends earlier than it asks for. `has_store`: the node's connector reaches a store that all nodes share.
    Raises InvalidRequestError naming the field."""
    given = tuple(message.prompt_token_ids)
    if not message.request_id:
        raise InvalidRequestError("request_id is empty", field="request_id")
    check_token_ids(given, vocab_size, field="prompt")
    sampling = sampling_from_wire(message.sampling_params)
    sampling.validate(vocab_size=vocab_size)
    sampling = replace(sampling, top_k=min(sampling.top_k, vocab_size))  # a GPU's sampler takes 31 bits
    num_prior = message.num_prior_output_tokens
    if num_prior >= len(given) > 0:
        raise InvalidRequestError("there is no prompt before the prior output tokens", field="num_prior_output_tokens")
    if num_prior >= sampling.max_tokens:
        raise InvalidRequestError("max_tokens is reached already", field="num_prior_output_tokens")
    num_prompt_tokens = len(given) - num_prior
    room = room_for_output(num_prompt_tokens, max_model_len, field="prompt")
    if sampling.max_tokens > room:
        reason = f"the prompt leaves {room} of {max_model_len} tokens for an output, not {sampling.max_tokens}"
        raise InvalidRequestError(reason, field="max_tokens")
    if num_prior > 0 and sampling.n != 1:
        raise InvalidRequestError("with prior output tokens n must be 1", field="n")
    if message.first_choice_index + sampling.n > MAX_N:  # an index beyond 32 bits would end the engine
        raise InvalidRequestError(f"a request has at most {MAX_N} outputs", field="first_choice_index")
    # With prompt log-probabilities the whole prompt is computed.
    may_fetch = (bool(message.sources) or has_store) and sampling.prompt_logprobs is None
    return EngineRequest(
        request_id=message.request_id,
        prompt_token_ids=given[:num_prompt_tokens],
        sampling=sampling,
        priority=message.priority,
        cache_salt=message.cache_salt,
        role=role,
        receive=role is KVRole.CONSUME or may_fetch,
        prior_output_token_ids=given[num_prompt_tokens:],
        first_choice_index=message.first_choice_index,
        yields_to_decodes=isinstance(message, decode_node_pb2.Admit) and message.yields_to_decodes,
    )
