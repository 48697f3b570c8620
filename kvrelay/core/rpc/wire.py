"""Our values to protobuf and back, for the messages that router and nodes exchange."""

from kvrelay.core.errors import KVRelayError
from kvrelay.core.generation.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import BlockHash, KVNamespace
from kvrelay.core.kv.source import HeldBlocks, KVSource
from kvrelay.core.node_report import (
    ConnectorCounters,
    FetchReport,
    NodeDescription,
    NodeLoad,
    NodeRole,
    NodeStats,
    RefusedBlock,
)
from kvrelay.v1 import common_pb2, node_pb2

_FINISH_TO_WIRE: dict[FinishReason | None, "common_pb2.FinishReason.ValueType"] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}
_ROLE_TO_WIRE: dict[NodeRole | None, "node_pb2.NodeRole.ValueType"] = {
    None: node_pb2.NODE_ROLE_UNSPECIFIED,
    NodeRole.PREFILL: node_pb2.NODE_ROLE_PREFILL,
    NodeRole.DECODE: node_pb2.NODE_ROLE_DECODE,
}
_ROLE_FROM_WIRE = {wire: role for role, wire in _ROLE_TO_WIRE.items()}


def finish_reason_to_wire(reason: FinishReason | None) -> "common_pb2.FinishReason.ValueType":
    return _FINISH_TO_WIRE[reason]


def sampling_to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    """Converts the parameters that nodes need: not the stop strings, since nodes know only tokens. The seed must have
    been drawn."""
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
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )


def logprobs_from_wire(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=message.token_id,
        logprob=message.logprob,
        rank=message.rank,
        top=tuple(zip(message.top_token_ids[:], message.top_logprobs[:], strict=False)),  # copies are read faster
    )


def prompt_logprobs_to_wire(found: PromptLogprobs) -> common_pb2.PromptLogprobs:
    return common_pb2.PromptLogprobs(
        token_ids=found.token_ids.tobytes(),
        logprobs=found.logprobs.tobytes(),
        ranks=found.ranks.tobytes(),
        top_token_ids=found.top_token_ids.tobytes(),
        top_logprobs=found.top_logprobs.tobytes(),
    )


def prompt_logprobs_from_wire(message: common_pb2.PromptLogprobs) -> PromptLogprobs:
    """Raises KVRelayError if the message is none that a node of ours sends."""
    try:
        return PromptLogprobs.of_bytes(
            message.token_ids, message.logprobs, message.ranks, message.top_token_ids, message.top_logprobs
        )
    except ValueError as failure:
        raise KVRelayError(f"the node's log-probabilities of the prompt are damaged: {failure}") from None


def output_to_wire(output: TokenOutput) -> common_pb2.TokenOutput:
    message = common_pb2.TokenOutput()
    fill_output(message, output)
    return message


def fill_output(message: common_pb2.TokenOutput, output: TokenOutput) -> None:
    """Appends `output` to `message`, which is empty or has the tokens that came before. With a message that is part of
    another one this saves a copy."""
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
        # A reason that only a newer protocol has still ends the output.
        finish_reason=_FINISH_FROM_WIRE.get(message.finish_reason, FinishReason.ERROR),
        stop_token_id=None if message.stop_token_id < 0 else message.stop_token_id,
    )


def source_to_wire(source: KVSource) -> common_pb2.KVSource:
    return common_pb2.KVSource(node_id=source.node_id, epoch=source.epoch, endpoint=source.endpoint)


def source_from_wire(message: common_pb2.KVSource) -> KVSource:
    return KVSource(node_id=message.node_id, epoch=message.epoch, endpoint=message.endpoint)


def held_to_wire(held: HeldBlocks) -> common_pb2.BlockSource:
    return common_pb2.BlockSource(source=source_to_wire(held.source), num_blocks=held.num_blocks)


def held_from_wire(message: common_pb2.BlockSource) -> HeldBlocks:
    return HeldBlocks(source_from_wire(message.source), message.num_blocks)


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


def description_to_wire(description: NodeDescription) -> node_pb2.DescribeResponse:
    return node_pb2.DescribeResponse(
        role=_ROLE_TO_WIRE[description.role],
        source=source_to_wire(description.source),
        kv_namespace=namespace_to_wire(description.kv_namespace),
        connector=description.connector,
        max_model_len=description.max_model_len,
        vocab_size=description.vocab_size,
        max_num_seqs=description.max_num_seqs,
        protocol=description.protocol,
        vocabulary=description.vocabulary,
        core_table=description.core_table,
        eos_token_ids=description.eos_token_ids,
    )


def description_from_wire(message: node_pb2.DescribeResponse) -> NodeDescription:
    return NodeDescription(
        role=_ROLE_FROM_WIRE.get(message.role),
        source=source_from_wire(message.source),
        kv_namespace=namespace_from_wire(message.kv_namespace),
        connector=message.connector,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        max_num_seqs=message.max_num_seqs,
        protocol=message.protocol,
        vocabulary=message.vocabulary,
        core_table=message.core_table,
        eos_token_ids=tuple(message.eos_token_ids),
    )


def load_to_wire(load: NodeLoad) -> node_pb2.NodeLoad:
    return node_pb2.NodeLoad(
        num_requests_running=load.num_requests_running,
        num_requests_decoding=load.num_requests_decoding,
        num_requests_waiting=load.num_requests_waiting,
        num_queued_tokens=load.num_queued_tokens,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        num_preemptions=load.num_preemptions,
        num_leases=load.num_leases,
        num_steps=load.num_steps,
        num_borrowing_steps=load.num_borrowing_steps,
    )


def load_from_wire(message: node_pb2.NodeLoad) -> NodeLoad:
    return NodeLoad(
        num_requests_running=message.num_requests_running,
        num_requests_decoding=message.num_requests_decoding,
        num_requests_waiting=message.num_requests_waiting,
        num_queued_tokens=message.num_queued_tokens,
        num_free_blocks=message.num_free_blocks,
        num_blocks=message.num_blocks,
        num_preemptions=message.num_preemptions,
        num_leases=message.num_leases,
        num_steps=message.num_steps,
        num_borrowing_steps=message.num_borrowing_steps,
    )


def stats_to_wire(stats: NodeStats) -> node_pb2.NodeStats:
    return node_pb2.NodeStats(
        num_leases_released=stats.num_leases_released,
        num_leases_expired=stats.num_leases_expired,
        num_leases_ended_early=stats.num_leases_ended_early,
        connectors=[
            node_pb2.ConnectorStats(connector=entry.connector, counters=entry.counters, refused=entry.refused)
            for entry in stats.connectors
        ],
    )


def stats_from_wire(message: node_pb2.NodeStats) -> NodeStats:
    return NodeStats(
        num_leases_released=message.num_leases_released,
        num_leases_expired=message.num_leases_expired,
        num_leases_ended_early=message.num_leases_ended_early,
        connectors=tuple(
            ConnectorCounters(entry.connector, dict(entry.counters), dict(entry.refused))
            for entry in message.connectors
        ),
    )


def refused_to_wire(refused: RefusedBlock) -> node_pb2.RefusedBlock:
    return node_pb2.RefusedBlock(holder=source_to_wire(refused.holder), name=refused.name)


def refused_from_wire(message: node_pb2.RefusedBlock) -> RefusedBlock:
    return RefusedBlock(source_from_wire(message.holder), BlockHash(message.name))


def fetch_report_to_wire(report: FetchReport) -> common_pb2.FetchReport:
    return common_pb2.FetchReport(
        num_tokens=report.num_tokens,
        fetched=[common_pb2.FetchedBlocks(node_id=node_id, num_blocks=count) for node_id, count in report.fetched],
        num_missing=report.num_missing,
        num_refused=report.num_refused,
        num_failed=report.num_failed,
    )


def fetch_report_from_wire(message: common_pb2.FetchReport) -> FetchReport:
    return FetchReport(
        message.num_tokens,
        tuple((entry.node_id, entry.num_blocks) for entry in message.fetched),
        num_missing=message.num_missing,
        num_refused=message.num_refused,
        num_failed=message.num_failed,
    )
