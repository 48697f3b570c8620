"""Whole runs against real servers over HTTP and gRPC: every request is recorded, and every failure is reported."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.bench import run as run_module
from kvrelay.bench.base import Failure
from kvrelay.bench.measure import measure
from kvrelay.bench.plan import plans_of
from kvrelay.bench.report import render
from kvrelay.bench.settings import (
    BenchSettings,
    LatencyBenchSettings,
    ServeBenchSettings,
    SweepBenchSettings,
    ThroughputBenchSettings,
)
from kvrelay.core.errors import KVError, OverloadedError, UnavailableError, UnknownModelError
from tests.bench.servers import DONE, LAST, PIECE, USAGE, answering, gateway, grpc_router
from tests.router.conftest import relay, tokenizer, tokenizer_directory
from tests.router.edge.edge_parts import MODEL, ScriptedRelay

__all__ = ["relay", "tokenizer", "tokenizer_directory"]  # fixtures

SMALL: dict[str, Any] = {"vocab_size": 258, "output_len": "4", "input_len": "8-16", "progress": "off"}


@pytest.fixture(params=["http", "grpc"])
async def url(request: pytest.FixtureRequest, relay: ScriptedRelay) -> AsyncIterator[str]:
    async with gateway(relay) if request.param == "http" else grpc_router(relay) as found:
        yield found


async def test_every_request_is_recorded_with_its_lengths_and_times(url: str, relay: ScriptedRelay) -> None:
    settings = ThroughputBenchSettings(url=url, requests=6, concurrency=2, **SMALL)
    model, [result] = await measure(settings)
    summary = result.summary
    assert (model, summary.num_completed, summary.output_tokens) == (MODEL, 6, 24)
    assert (summary.counted_by, summary.num_short, summary.failures) == ("usage", 0, ())
    assert result.client_cpu_share > 0
    assert [record.index for record in result.records] == list(range(6))
    for record, routed in zip(sorted(result.records, key=lambda r: r.sent), relay.requests[1:], strict=True):
        assert 8 <= len(routed.prompt_token_ids) <= 16
        assert record.scheduled <= record.sent < record.arrivals[0] <= record.arrivals[-1] <= record.finished
    assert all(routed.sampling.ignore_eos and routed.sampling.temperature == 0 for routed in relay.requests)


async def test_sampling_is_asked_for_and_what_is_not_set_is_left_to_the_server(url: str, relay: ScriptedRelay) -> None:
    await measure(LatencyBenchSettings(url=url, requests=1, warmup=0, temperature=0.5, top_k=9, top_p=0.5, **SMALL))
    await measure(LatencyBenchSettings(url=url, requests=1, warmup=0, temperature=0.5, **SMALL))
    asked = [(one.sampling.temperature, one.sampling.top_k, one.sampling.top_p) for one in relay.requests]
    assert asked == [(0.5, 9, 0.5), (0.5, 0, 1.0)]


async def test_further_fields_are_in_every_request(relay: ScriptedRelay) -> None:
    extra = '{"min_p": 0.25, "logit_bias": {"7": -1.5}}'
    async with gateway(relay) as url:
        await measure(LatencyBenchSettings(url=url, requests=1, extra_body=extra, **SMALL))
    asked = [(one.sampling.min_p, dict(one.sampling.logit_bias)) for one in relay.requests]
    assert asked == [(0.25, {7: -1.5})] * 2, "in the warm-up as well"


async def test_the_warm_up_is_sent_but_not_counted(url: str, relay: ScriptedRelay) -> None:
    settings = LatencyBenchSettings(url=url, requests=2, warmup=3, **SMALL)
    _, [result] = await measure(settings)
    assert (result.summary.num_completed, len(relay.requests)) == (2, 5)
    prompts = {routed.prompt_token_ids for routed in relay.requests}
    assert len(prompts) == 5, "no measured prompt was sent before"


async def test_the_progress_line_fits_the_terminal(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A longer one would leave a line behind each time that it is shown."""
    monkeypatch.setattr(run_module, "_PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((40, 24)))
    monkeypatch.setattr("sys.stderr.fileno", lambda: 2)
    await measure(ServeBenchSettings(url=url, concurrency=1, requests=3, **{**SMALL, "progress": "on"}))
    shown = [line.removesuffix("\x1b[K") for line in capsys.readouterr().err.split("\r")]
    assert max(map(len, shown)) == 39 and any(line.startswith("0/3 requests done, 1 running") for line in shown)


async def test_conversations_hold_what_was_said(url: str, relay: ScriptedRelay, tokenizer_directory: Path) -> None:
    settings = ServeBenchSettings(
        url=url,
        endpoint="chat",
        workload="multi-turn",
        turns=3,
        requests=2,
        concurrency=1,
        warmup=0,
        tokenizer=str(tokenizer_directory),
        input_len="5",
        output_len="4",
        progress="off",
    )
    _, [result] = await measure(settings)
    assert result.summary.failures == ()
    assert list(result.by_kind) == ["turn 1", "turn 2", "turn 3"]
    texts = [relay.tokenizer.decode(routed.prompt_token_ids, skip_special_tokens=False) for routed in relay.requests]
    answer = relay.tokenizer.decode(
        (await relay.tokenizer.encode(relay.reply, add_special_tokens=False))[:4], skip_special_tokens=False
    )
    assert [text.count("<user>") for text in texts] == [1, 2, 3, 1, 2, 3]
    assert [text.count(f"<assistant>{answer}") for text in texts] == [0, 1, 2, 0, 1, 2]


async def test_token_id_conversations_over_grpc_hold_the_answers(relay: ScriptedRelay) -> None:
    async with grpc_router(relay) as url:
        settings = ServeBenchSettings(
            url=url, workload="multi-turn", turns=2, requests=1, concurrency=1, warmup=0, **SMALL
        )
        await measure(settings)
    first, second = (routed.prompt_token_ids for routed in relay.requests)
    reply = (await relay.tokenizer.encode(relay.reply, add_special_tokens=False))[:4]
    assert second[: len(first) + 4] == (*first, *reply)


async def test_conversations_count_their_prompts_where_the_server_does_not() -> None:
    async with answering((PIECE, PIECE, LAST, DONE)) as url:
        settings = ServeBenchSettings(
            **SMALL | {"input_len": "7"}, url=url, workload="multi-turn", turns=3, requests=1, concurrency=1, warmup=0
        )
        _, [result] = await measure(settings)
    assert [record.num_prompt_tokens for record in result.records] == [7, 7 + 2 + 7, 7 + 2 + 7 + 2 + 7]


async def test_mixed_load_has_both_kinds(url: str) -> None:
    settings = ServeBenchSettings(
        url=url,
        workload="mixed",
        streams=2,
        long_input_len="40",
        long_output_len="2",
        long_every=0.1,
        duration=0.3,
        **SMALL,
    )
    [plan] = plans_of(settings)
    kinds = [(session.at, next(iter(session.requests)).kind) for session in plan.sessions]
    assert kinds == [(0.0, "steady")] * 2 + [(pytest.approx(at), "long") for at in (0.0, 0.1, 0.2)]
    _, [result] = await measure(settings)
    assert result.by_kind["long"].num_completed >= 1, "the later ones are dropped if the machine stalls"
    assert result.by_kind["steady"].num_completed >= 2
    assert result.summary.seconds == pytest.approx(0.3)
    assert all(record.scheduled < 0.3 for record in result.records if record.kind == "steady")


async def test_a_stream_that_fails_does_not_ask_again_at_once(url: str, relay: ScriptedRelay) -> None:
    relay.fail_with = OverloadedError("queues are full")
    settings = ServeBenchSettings(url=url, workload="mixed", streams=2, duration=0.3, warmup=0, **SMALL)
    _, [result] = await measure(settings)
    assert [record.kind for record in result.records].count("steady") == 2


async def test_a_sweep_measures_every_load(url: str) -> None:
    settings = SweepBenchSettings(url=url, request_rates=(500.0, 1000.0), requests=3, **SMALL)
    _, results = await measure(settings)
    assert [(result.label, result.summary.num_completed) for result in results] == [("500/s", 3), ("1000/s", 3)]


async def test_failures_are_counted_by_kind(url: str, relay: ScriptedRelay) -> None:
    relay.fail_with, relay.fail_at = KVError("lost its block"), 2
    _, [result] = await measure(ThroughputBenchSettings(url=url, requests=3, warmup=0, **SMALL))
    [failure] = result.summary.failures
    assert (failure.count, result.summary.num_failed) == (3, 3)
    assert "lost its block" in failure.first_message
    assert failure.kind == ("grpc INTERNAL" if url.startswith("grpc") else "error in the stream")
    assert result.summary.output_tokens == 6, "what had come before counts as throughput"


async def test_the_turns_that_a_failure_leaves_unsent_are_counted(url: str, relay: ScriptedRelay) -> None:
    relay.fail_with = OverloadedError("queues are full")
    settings = ServeBenchSettings(url=url, workload="multi-turn", turns=3, requests=2, concurrency=1, warmup=0, **SMALL)
    _, [result] = await measure(settings)
    assert (result.summary.num_failed, result.num_unsent) == (2, 4)
    assert "4 turns were not sent, because an earlier one failed" in render(result, None)


async def test_a_refusal_has_its_status(url: str, relay: ScriptedRelay) -> None:
    relay.fail_with = OverloadedError("queues are full")
    _, [result] = await measure(ThroughputBenchSettings(url=url, requests=2, warmup=0, **SMALL))
    [failure] = result.summary.failures
    assert failure.kind == ("grpc RESOURCE_EXHAUSTED" if url.startswith("grpc") else "http 429")
    assert failure.first_message == "queues are full"


async def test_a_failed_warm_up_ends_it(url: str, relay: ScriptedRelay) -> None:
    relay.fail_with = OverloadedError("queues are full")
    with pytest.raises(UnavailableError, match=r"warm-up request failed: .*queues are full"):
        await measure(LatencyBenchSettings(url=url, **SMALL))


async def test_a_request_past_its_timeout_has_failed(url: str, relay: ScriptedRelay) -> None:
    relay.hang_at = 1
    _, [result] = await measure(ThroughputBenchSettings(url=url, requests=2, warmup=0, timeout=0.5, **SMALL))
    assert [(failure.kind, failure.count) for failure in result.summary.failures] == [("timeout", 2)]
    assert result.summary.seconds > 0.4, "the time for which it hung counts"


async def test_an_interrupt_keeps_what_there_is(url: str, relay: ScriptedRelay) -> None:
    relay.hang_at = 2
    measuring = asyncio.create_task(measure(ThroughputBenchSettings(url=url, requests=3, warmup=0, **SMALL)))
    while relay.num_running < 3:
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    _, [result] = await measuring
    assert result.was_cut
    assert (result.summary.num_cancelled, result.summary.num_failed) == (3, 0)
    while relay.num_running:  # the server has heard of it
        await asyncio.sleep(0)


async def test_signals_do_afterwards_what_they_did_before(url: str) -> None:
    """As when other programs measure, and end their servers when they are told to end."""

    def end(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, end)
    try:
        await measure(LatencyBenchSettings(url=url, requests=1, **SMALL))
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_an_interrupt_of_the_warm_up_ends_it_without_a_result(url: str, relay: ScriptedRelay) -> None:
    relay.hang_at = 0
    measuring = asyncio.create_task(measure(ThroughputBenchSettings(url=url, requests=3, warmup=2, **SMALL)))
    while not relay.num_running:
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    assert await measuring == (MODEL, [])
    assert len(relay.requests) == 1


async def test_a_model_that_is_not_served_is_refused(url: str) -> None:
    with pytest.raises(UnknownModelError, match=f"no model 'other' there; .* has {MODEL}"):
        await measure(LatencyBenchSettings(url=url, model="other", **SMALL))


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_the_error_says_where_nobody_answers(scheme: str, unused_tcp_port: int) -> None:
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{unused_tcp_port}.*--url"):
        await measure(LatencyBenchSettings(url=f"{scheme}://127.0.0.1:{unused_tcp_port}", **SMALL))


async def test_a_server_that_is_not_ready_is_told_from_none(url: str, relay: ScriptedRelay) -> None:
    relay.available = False
    with pytest.raises(UnavailableError, match=r"answers .*\(no decode node is known\); wait until"):
        await measure(LatencyBenchSettings(url=url, **SMALL))


async def answer_of(*pieces: bytes, status: int = 200, **more: Any) -> tuple[Any, Any]:
    """Returns the record of one request, and the run's summary."""
    async with answering(pieces, status=status) as url:
        settings: BenchSettings = LatencyBenchSettings(url=f"{url}/v1", requests=1, warmup=0, **SMALL, **more)
        _, [result] = await measure(settings)
    return result.records[0], result.summary


async def test_usage_counts_tokens_and_pieces_count_without() -> None:
    record, summary = await answer_of(PIECE, PIECE, LAST, USAGE, DONE)
    assert (record.num_output_tokens, record.num_prompt_tokens, len(record.arrivals)) == (5, 9, 2)
    assert summary.counted_by == "usage"
    record, summary = await answer_of(PIECE, PIECE, LAST, DONE)
    assert (record.num_output_tokens, summary.counted_by, summary.num_short) == (2, "chunks", 1)


async def test_a_single_token_without_text_is_output() -> None:
    one = USAGE.replace(b'"completion_tokens":5', b'"completion_tokens":1')
    record, summary = await answer_of(LAST, one, DONE)
    assert (record.failure, record.num_output_tokens) == (None, 1)
    assert record.sent < record.arrivals[0] <= record.finished
    assert summary.num_completed == 1


async def test_an_error_that_is_null_is_none() -> None:
    pieces = (piece.replace(b'{"choices"', b'{"error":null,"choices"') for piece in (PIECE, LAST, USAGE))
    record, _ = await answer_of(*pieces, DONE)
    assert (record.failure, len(record.arrivals)) == (None, 1)


async def test_events_may_arrive_in_any_pieces() -> None:
    whole = PIECE + PIECE + LAST + USAGE + DONE
    record, _ = await answer_of(*(whole[i : i + 7] for i in range(0, len(whole), 7)))
    assert (len(record.arrivals), record.num_output_tokens, record.failure) == (2, 5, None)


async def test_events_that_come_in_one_read_are_told_from_fast_ones() -> None:
    _, summary = await answer_of(PIECE * 16 + LAST + USAGE + DONE)
    assert summary.itl is not None and (summary.itl.max, summary.merged_share) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("pieces", "status", "kind", "message"),
    [
        ((PIECE,), 200, "ended early", "finish_reason"),
        ((b'{"error":{"message":"no GPU left"}}',), 200, "ended early", "finish_reason: no GPU left"),
        ((LAST, DONE), 200, "no output", "no tokens"),
        ((b'{"error":{"message":"too long"}}',), 400, "http 400", "too long"),
        ((b"<html>gateway</html>",), 502, "http 502", "<html>gateway</html>"),
        ((PIECE, b'data: {"error":{"message":"died"}}\n\n'), 200, "error in the stream", "died"),
        ((PIECE, b"event: error\ndata: it died\n\n", DONE), 200, "error in the stream", "it died"),
        ((b"data: {not json\n\n",), 200, "not understood", "property name"),
        ((b"data: %s\n\n" % (b"[" * 100_000),), 200, "not understood", "recursion"),
        ((PIECE, LAST, USAGE.replace(b":5", b':"5"')), 200, "not understood", "usage: completion_tokens is '5'"),
        ((PIECE, LAST, USAGE.replace(b":9", b":9.5")), 200, "not understood", "usage: prompt_tokens is 9.5"),
        ((PIECE, LAST, USAGE.replace(b":5", b":-1")), 200, "not understood", "usage: completion_tokens is -1"),
    ],
)
async def test_every_failure_has_its_kind_and_message(
    pieces: tuple[bytes, ...], status: int, kind: str, message: str
) -> None:
    record, _ = await answer_of(*pieces, status=status)
    assert record.failure is not None
    assert record.failure.kind == kind
    assert message in record.failure.message


async def test_an_error_without_end_is_read_no_further_than_a_message() -> None:
    async with answering(itertools.repeat(b"x" * 1024), status=502) as url:
        settings: BenchSettings = LatencyBenchSettings(url=url, requests=1, warmup=0, **SMALL)
        _, [result] = await measure(settings)
    assert result.records[0].failure == Failure("http 502", "x" * 500)


def delta(content: dict[str, str], reason: str | None = None) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"delta": content, "finish_reason": reason}]}).encode()


OPENING = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "pieces",
    [
        (OPENING, {"content": "a"}, {"content": "b"}, {}),
        (OPENING, {"reasoning_content": "a"}, {"content": "b"}, {}),
        (OPENING, OPENING | {"reasoning": "a"}, OPENING | {"content": "b"}, OPENING),
        (OPENING, OPENING | {"content": "a"}, OPENING, OPENING),  # the second token has no text yet
    ],
    ids=["once", "reasoning", "role-in-all", "no-text-yet"],
)
async def test_the_opening_of_a_chat_is_no_token(pieces: tuple[dict[str, str], ...], tokenizer_directory: Path) -> None:
    *some, last = pieces
    async with answering((*map(delta, some), delta(last, "stop"), DONE)) as url:
        settings = LatencyBenchSettings(
            url=url, endpoint="chat", tokenizer=str(tokenizer_directory), requests=1, warmup=0, progress="off"
        )
        _, [result] = await measure(settings)
    assert len(result.records[0].arrivals) == 2


async def test_no_cookie_ties_the_load_to_one_server() -> None:
    cookies: list[str | None] = []
    async with answering((PIECE, LAST, DONE), cookies=cookies) as url:
        by_name = url.replace("127.0.0.1", "localhost")  # there are no cookies for addresses
        await measure(LatencyBenchSettings(url=by_name, requests=2, warmup=1, **SMALL))
    assert cookies == [None] * 3


@pytest.mark.parametrize(("keep_alive", "num_connections"), [(True, 1), (False, 3)])
async def test_a_connection_is_kept_unless_told_otherwise(keep_alive: bool, num_connections: int) -> None:
    connections: set[object] = set()
    async with answering([PIECE, LAST, DONE], connections=connections) as url:
        await measure(LatencyBenchSettings(url=url, requests=3, warmup=0, keep_alive=keep_alive, **SMALL))
    assert len(connections) == num_connections


async def test_a_server_that_is_not_ready_is_told_from_one_without_a_list_of_models() -> None:
    async with answering((PIECE, LAST, DONE), models_status=503) as url:
        with pytest.raises(UnavailableError, match="/v1/models answers http 503"):
            await measure(LatencyBenchSettings(url=url, **SMALL))
        _, [result] = await measure(LatencyBenchSettings(url=url, model="m", requests=1, warmup=0, **SMALL))
    assert result.summary.num_completed == 1
    async with answering((PIECE, LAST, DONE), models_status=404) as url:
        with pytest.raises(UnknownModelError, match="names no model: give one with --model"):
            await measure(LatencyBenchSettings(url=url, **SMALL))


async def test_an_address_may_end_with_a_slash(url: str) -> None:
    _, [result] = await measure(LatencyBenchSettings(url=f"{url}/", requests=1, warmup=0, **SMALL))
    assert result.summary.num_completed == 1
