"""Choices that end at different times, and what is counted, however a request ends."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from kvrelay.core.errors import KVError, KVRelayError, UnavailableError
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.text.choice import TextChunk
from kvrelay.text.tokenizer import Tokenizer
from router.request import RequestEvent, RequestTrace, RoutedRequest, ServedModel
from tests.manual_clock import ManualClock
from tests.router.edge.edge_parts import ScriptedRelay, counted, make_edge
from tests.router.scripted_nodes import NAMESPACE


@dataclass
class EventRelay(ScriptedRelay):
    """A relay that yields exactly these events."""

    events: Sequence[RequestEvent] = field(default_factory=list)

    async def run(self, request: RoutedRequest) -> AsyncGenerator[RequestEvent, None]:
        self.running.add(request.request_id)
        try:
            for event in self.events:
                yield event
        finally:
            self.running.remove(request.request_id)


TRACE = RequestTrace(None, "decode-0", 1, 1, 0, 0, 0.0, 0.0, 0.0)


def request(**sampling: object) -> RoutedRequest:
    params = SamplingParams(seed=1, max_tokens=100, **sampling)  # type: ignore[arg-type]
    return RoutedRequest("id", (5, 6), params, NAMESPACE, timeout=60.0)


async def tokens(tokenizer: Tokenizer, index: int, text: str, reason: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(index, tuple(await tokenizer.encode(text, add_special_tokens=False)), (), reason)


async def test_a_stop_string_ends_one_choice_and_the_other_goes_on(tokenizer: Tokenizer) -> None:
    script: list[RequestEvent] = [
        await tokens(tokenizer, 0, "one END dropped"),
        await tokens(tokenizer, 1, "two "),
        await tokens(tokenizer, 0, "never seen"),
        await tokens(tokenizer, 1, "goes on", FinishReason.LENGTH),
        await tokens(tokenizer, 0, "never seen either", FinishReason.LENGTH),
        TRACE,
    ]
    relay = EventRelay(tokenizer, events=script)
    chunks = [chunk async for chunk in make_edge(relay).generate(request(n=2, stop=("END",)))]
    assert chunks[-1] == TRACE
    assert relay.finished == [("id", 0)], "the relay need not go on with it"
    texts = [(chunk.index, chunk.text, chunk.finish_reason) for chunk in chunks if isinstance(chunk, TextChunk)]
    assert texts == [
        (0, "one ", FinishReason.STOP),
        (1, "two ", None),
        (1, "goes on", FinishReason.LENGTH),
    ]
    assert relay.num_running == 0


async def test_the_time_between_tokens_is_that_since_the_last_ones(tokenizer: Tokenizer) -> None:
    clock = ManualClock()
    script = [await tokens(tokenizer, 0, "a", reason) for reason in (None, None, FinishReason.STOP)]
    edge = make_edge(EventRelay(tokenizer, events=[*script, TRACE]), clock)
    async for _ in edge.generate(request()):
        clock.seconds += 1.0
    assert counted(edge, "inter_token_latency_seconds_sum") == 2.0


async def test_a_stop_token_is_no_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    (stop_id,) = await tokenizer.encode("x", add_special_tokens=False)
    output = await tokens(tokenizer, 0, "ab")
    ended = TokenOutput(0, (*output.token_ids, stop_id), (), FinishReason.STOP, stop_id)
    for include, text in ((False, "ab"), (True, "abx")):
        edge = make_edge(EventRelay(tokenizer, events=[ended, TRACE]))
        chunk, trace = [e async for e in edge.generate(request(include_stop_str_in_output=include))]
        assert isinstance(chunk, TextChunk)
        assert (chunk.text, chunk.stop_reason, trace) == (text, stop_id, TRACE)
        assert chunk.token_ids == ended.token_ids


async def test_min_tokens_holds_for_stop_strings(tokenizer: Tokenizer) -> None:
    output = await tokens(tokenizer, 0, "b b b b", FinishReason.LENGTH)
    minimum = len(output.token_ids) - 1
    edge = make_edge(EventRelay(tokenizer, events=[output, TRACE]))
    chunk, _ = [e async for e in edge.generate(request(min_tokens=minimum, stop=("b",)))]
    assert isinstance(chunk, TextChunk)
    assert (chunk.text, chunk.stop_reason) == ("b b b ", "b")


async def test_an_abandoned_request_counts_as_aborted_and_a_failed_one_as_an_error(tokenizer: Tokenizer) -> None:
    relay = EventRelay(tokenizer, events=[await tokens(tokenizer, 0, "a"), await tokens(tokenizer, 0, "b")])
    edge = make_edge(relay)
    async with aclosing(edge.generate(request())) as events:
        await anext(events)
        assert counted(edge, "num_requests_running") == 1
    assert relay.num_running == 0
    assert counted(edge, "num_requests_running") == 0
    assert counted(edge, "request_success_total", finished_reason="abort") == 1

    for error in (KVError("lost"), ZeroDivisionError("our own fault")):
        failing = make_edge(ScriptedRelay(tokenizer, fail_with=error))
        with pytest.raises(type(error)):
            [event async for event in failing.generate(request())]
        assert counted(failing, "request_errors_total", code="INTERNAL") == 1
        assert counted(failing, "request_success_total", finished_reason="abort") == 0
        assert counted(failing, "num_requests_running") == 0


async def test_a_request_that_is_closed_when_its_time_is_over_was_not_aborted(tokenizer: Tokenizer) -> None:
    clock = ManualClock()
    edge = make_edge(EventRelay(tokenizer, events=[await tokens(tokenizer, 0, "a")]), clock)
    for seconds, num_late in ((58.0, 0), (59.5, 1)):  # of 60
        async with aclosing(edge.generate(request())) as events:
            await anext(events)
            clock.seconds += seconds
        assert counted(edge, "request_success_total", finished_reason="abort") == 1
        assert counted(edge, "request_errors_total", code="DEADLINE_EXCEEDED") == num_late
        assert counted(edge, "num_requests_running") == 0


async def test_the_log_has_what_failed_by_our_own_fault_and_no_other_failure(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (UnavailableError("no node"), KVRelayError("the model returned logits that are not finite")):
        edge = make_edge(ScriptedRelay(tokenizer, fail_with=error))
        with pytest.raises(type(error)):
            [event async for event in edge.generate(request())]
    assert [record.getMessage() for record in caplog.records] == [
        "request id failed: the model returned logits that are not finite"
    ]


def test_a_failure_before_admission_is_counted_whatever_it_is(tokenizer: Tokenizer) -> None:
    edge = make_edge(ScriptedRelay(tokenizer))
    for error in (UnavailableError("no node"), ZeroDivisionError("our own fault")):
        with pytest.raises(type(error)), edge.counting_errors():
            raise error
    assert counted(edge, "request_errors_total", code="UNAVAILABLE") == 1
    assert counted(edge, "request_errors_total", code="INTERNAL") == 1


class WiderRelay(ScriptedRelay):
    """A relay whose model has more token ids than a tokenizer can count."""

    def served_model(self) -> ServedModel:
        return replace(super().served_model(), vocab_size=2**40)


async def test_a_text_that_cannot_be_made_of_tokens_is_counted_as_failed(tokenizer: Tokenizer) -> None:
    edge = make_edge(WiderRelay(tokenizer))
    with pytest.raises(OverflowError):
        await edge.detokenize([2**33], None, skip_special_tokens=False, field="tokens")
    assert counted(edge, "request_errors_total", code="INTERNAL") == 1
