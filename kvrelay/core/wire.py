"""Our values to protobuf and back, for the messages that router and nodes both speak."""

from kvrelay.core.block_hash import KVNamespace
from kvrelay.core.kv_source import KVSource
from kvrelay.core.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.v1 import common_pb2, node_pb2

_FINISH_TO_WIRE: dict[FinishReason | None, "common_pb2.FinishReason.ValueType"] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}


def finish_reason_to_wire(reason: FinishReason | None) -> "common_pb2.FinishReason.ValueType":
    return _FINISH_TO_WIRE[reason]


def sampling_to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    """Stop strings stay with the router: nodes see tokens only. The seed must have been drawn."""
    assert params.seed is not None
    return common_pb2.SamplingParams(
        n=params.n,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.biases),
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        seed=params.seed,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        n=message.n,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def logprobs_to_wire(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top=[common_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
    )


def logprobs_from_wire(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=message.token_id,
        logprob=message.logprob,
        rank=message.rank,
        top=tuple((top.token_id, top.logprob) for top in message.top),
    )


def output_to_wire(output: TokenOutput) -> common_pb2.TokenOutput:
    message = common_pb2.TokenOutput()
    fill_output(message, output)
    return message


def fill_output(message: common_pb2.TokenOutput, output: TokenOutput) -> None:
    """As `output_to_wire`, into a `message` that is new or has the tokens before; it may be part of another one."""
    message.index = output.index
    message.token_ids.extend(output.token_ids)
    message.stop_token_id = -1 if output.stop_token_id is None else output.stop_token_id
    if output.finish_reason is not None:
        message.finish_reason = _FINISH_TO_WIRE[output.finish_reason]
    for entry in output.logprobs:
        message.logprobs.append(logprobs_to_wire(entry))


def output_from_wire(message: common_pb2.TokenOutput) -> TokenOutput:
    logprobs = message.logprobs
    return TokenOutput(
        index=message.index,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(logprobs_from_wire, logprobs)) if logprobs else (),
        # A reason of a newer protocol: over it is, and in no way that we know.
        finish_reason=_FINISH_FROM_WIRE.get(message.finish_reason, FinishReason.ERROR),
        stop_token_id=None if message.stop_token_id < 0 else message.stop_token_id,
    )


def source_to_wire(source: KVSource) -> common_pb2.KVSource:
    return common_pb2.KVSource(node_id=source.node_id, epoch=source.epoch, endpoint=source.endpoint)


def source_from_wire(message: common_pb2.KVSource) -> KVSource:
    return KVSource(node_id=message.node_id, epoch=message.epoch, endpoint=message.endpoint)


def namespace_to_wire(namespace: KVNamespace) -> node_pb2.KVNamespace:
    return node_pb2.KVNamespace(
        model_fingerprint=namespace.model_fingerprint,
        kv_dtype=namespace.kv_dtype,
        layout_id=namespace.layout_id,
        block_size=namespace.block_size,
    )


def namespace_from_wire(message: node_pb2.KVNamespace) -> KVNamespace:
    return KVNamespace(
        model_fingerprint=message.model_fingerprint,
        kv_dtype=message.kv_dtype,
        layout_id=message.layout_id,
        block_size=message.block_size,
    )
