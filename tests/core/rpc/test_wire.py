"""What crosses the wire keeps its value; unknown values of a newer protocol do not break the reader."""

import math
import sys
from dataclasses import fields

import pytest

from kvrelay.core.errors import KVRelayError
from kvrelay.core.generation.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import ConnectorCounters, FetchReport, NodeDescription, NodeLoad, NodeRole, NodeStats
from kvrelay.core.rpc.wire import (
    description_from_wire,
    description_to_wire,
    fetch_report_from_wire,
    fetch_report_to_wire,
    load_from_wire,
    load_to_wire,
    output_from_wire,
    output_to_wire,
    prompt_logprobs_from_wire,
    prompt_logprobs_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    stats_from_wire,
    stats_to_wire,
)
from kvrelay.v1 import common_pb2, node_pb2

DESCRIPTION = NodeDescription(
    role=NodeRole.DECODE,
    source=KVSource("decode-0", 2**63 + 1, "here"),
    kv_namespace=KVNamespace(b"fingerprint", "bfloat16", "layout", 16),
    connector="shared_memory,redis",
    max_model_len=1,
    vocab_size=4,
    max_num_seqs=5,
    vocabulary=b"digest",
    core_table="01ab",
    eos_token_ids=(2, 7),
)


def test_every_finish_reason_survives_the_wire() -> None:
    for reason in (None, *FinishReason):
        output = TokenOutput(1, (5, 6), finish_reason=reason)
        assert output_from_wire(output_to_wire(output)) == output


def test_tokens_survive_the_wire_with_their_log_probabilities_and_stop_token() -> None:
    logprobs = (TokenLogprobs(5, -0.5, 3, ((7, -0.125), (8, -0.25))), TokenLogprobs(0, -1.0, 1))
    for stop_token_id in (None, 0, 6):
        output = TokenOutput(1, (5, 0), logprobs, FinishReason.STOP, stop_token_id)
        assert output_from_wire(output_to_wire(output)) == output


@pytest.mark.parametrize("num_top", [0, 2])
def test_log_probabilities_of_a_prompt_survive_the_wire(num_top: int) -> None:
    tops = ((7, -0.125), (8, -0.25)), ((2**32 - 1, -math.inf), (0, 0.0))
    entries = [TokenLogprobs(5 + i, -0.5, 2**31, top[:num_top]) for i, top in enumerate(tops)]
    for given in (entries, []):
        message = prompt_logprobs_to_wire(PromptLogprobs.of(given))
        assert list(prompt_logprobs_from_wire(message)) == given


@pytest.mark.parametrize(
    "columns",
    [
        {"token_ids": bytes(7)},
        {"logprobs": bytes(4)},
        {"ranks": bytes(12)},
        {"top_logprobs": bytes(12)},
        {"top_token_ids": bytes(12), "top_logprobs": bytes(12)},
    ],
)
def test_damaged_log_probabilities_of_a_prompt_are_an_error_of_ours(columns: dict[str, bytes]) -> None:
    message = prompt_logprobs_to_wire(PromptLogprobs.of([TokenLogprobs(5, -0.5, 3, ((7, -0.125),))] * 2))
    for name, column in columns.items():
        setattr(message, name, column)
    with pytest.raises(KVRelayError, match="log-probabilities of the prompt are damaged"):
        prompt_logprobs_from_wire(message)


def test_log_probabilities_of_a_long_prompt_take_no_more_calls_than_those_of_a_short_one() -> None:
    """Nodes and the router convert them in one go, while all other streams wait."""

    def num_calls(num_tokens: int) -> int:
        found = PromptLogprobs.of([TokenLogprobs(5, -0.5, 3, ((7, -0.125),) * 20)] * num_tokens)
        calls: list[str] = []
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            prompt_logprobs_from_wire(prompt_logprobs_to_wire(found))
        finally:
            sys.setprofile(before)
        return len(calls)

    assert num_calls(1000) == num_calls(1)


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(None, 0), (0, None), (3, 4)])
def test_what_nodes_need_of_sampling_parameters_survives_the_wire(
    logprobs: int | None, prompt_logprobs: int | None
) -> None:
    params = SamplingParams(
        n=2,
        max_tokens=3,
        min_tokens=1,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=-0.75,
        logit_bias=((5, 1.5), (6, -2.0)),
        stop_token_ids=(7, 8),
        ignore_eos=True,
        seed=2**64 - 1,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    assert sampling_from_wire(sampling_to_wire(params)) == params
    changed = {field.name for field in fields(SamplingParams) if getattr(params, field.name) != field.default}
    only_the_router_s = {"stop", "include_stop_str_in_output", "skip_special_tokens"}
    assert changed | only_the_router_s | {"logprobs", "prompt_logprobs"} == {f.name for f in fields(SamplingParams)}


def test_an_unknown_finish_reason_ends_the_output_as_an_error() -> None:
    message = common_pb2.TokenOutput(token_ids=[5], stop_token_id=-1)
    message.finish_reason = 77  # type: ignore[assignment]
    assert output_from_wire(message).finish_reason is FinishReason.ERROR


def test_a_nodes_description_survives_the_wire() -> None:
    assert description_from_wire(description_to_wire(DESCRIPTION)) == DESCRIPTION


def test_a_node_of_an_unknown_kind_has_no_role() -> None:
    message = description_to_wire(DESCRIPTION)
    message.role = 77  # type: ignore[assignment]
    assert description_from_wire(message).role is None
    assert description_from_wire(node_pb2.DescribeResponse()).role is None


def test_a_nodes_load_survives_the_wire() -> None:
    load = NodeLoad(*range(1, len(fields(NodeLoad)) + 1))
    assert load_from_wire(load_to_wire(load)) == load


def test_a_nodes_counters_survive_the_wire() -> None:
    connectors = (
        ConnectorCounters("shared_memory", {"blocks_fetched": 3.0, "fetch_seconds": 0.25}, {"digest": 2}),
        ConnectorCounters("redis", {}, {}),
    )
    stats = NodeStats(1, 2, 3, connectors)
    assert stats_from_wire(stats_to_wire(stats)) == stats


def test_a_fetch_report_survives_the_wire() -> None:
    report = FetchReport(37, (("prefill-0", 4), ("", 1)), num_missing=1, num_refused=2, num_failed=3)
    assert fetch_report_from_wire(fetch_report_to_wire(report)) == report
