"""Log-probabilities in OpenAI's and vLLM's form, and tokens in vLLM's."""

import json
import math

import pytest

from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.turns import ITEMS_AT_A_TIME
from kvrelay.text.choice import TextChunk
from kvrelay.text.tokenizer import Tokenizer
from router.edge.openai_format import (
    MIN_LOGPROB,
    ChatFormat,
    CompletionFormat,
    Echo,
    Envelope,
    StreamFormatter,
    Usage,
    WholeChoice,
    tokens_response,
    whole_response,
)
from tests.loop_turns import counting_turns
from tests.peak_memory import tracing_peak


def test_the_likeliest_tokens_are_shown_best_first_and_the_token_itself_is_one_more(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(5, -3.0, 9, ((6, -0.5), (7, -1.0)))
    text = tokenizer.token_text
    shown = CompletionFormat(tokenizer).logprobs([entry], [0])["top_logprobs"]
    assert [list(each.items()) for each in shown or ()] == [[(text(6), -0.5), (text(7), -1.0), (text(5), -3.0)]]


def test_of_tokens_with_the_same_text_the_likelier_one_is_shown(tokenizer: Tokenizer) -> None:
    """Such as parts of a character."""
    of_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    likely, less, sampled = of_byte[b"\xe4"], of_byte[b"\xbd"], of_byte[b"a"]
    entry = TokenLogprobs(sampled, -3.0, 9, ((likely, -0.5), (less, -1.0)))
    assert CompletionFormat(tokenizer).logprobs([entry], [0])["top_logprobs"] == [{"a": -3.0, "\ufffd": -0.5}]


def test_a_likelier_token_with_the_text_of_the_sampled_one_is_shown(tokenizer: Tokenizer) -> None:
    """Otherwise a client that compares the sampled token with the likeliest one would take it for greedy."""
    of_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    entry = TokenLogprobs(of_byte[b"\xbd"], -3.0, 2, ((of_byte[b"\xe4"], -0.5),))
    assert CompletionFormat(tokenizer).logprobs([entry], [0])["top_logprobs"] == [{"\ufffd": -0.5}]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_a_token_that_cannot_occur_has_a_number(logprob: float, tokenizer: Tokenizer) -> None:
    """JSON has no infinity, and no NaN."""
    entry = TokenLogprobs(5, logprob, 9, ((6, logprob),))
    for shown in (
        CompletionFormat(tokenizer).logprobs([entry], [0]),
        ChatFormat(tokenizer).logprobs([entry], [0]),
    ):
        text = json.dumps(shown)
        assert "Infinity" not in text and "NaN" not in text and text.count(str(MIN_LOGPROB)) >= 2


@pytest.mark.parametrize("shape_class", [ChatFormat, CompletionFormat])
async def test_those_of_a_whole_answer_are_encoded_as_they_come(
    tokenizer: Tokenizer, shape_class: type[ChatFormat | CompletionFormat]
) -> None:
    """Encoded at the end, a hundred long choices would hold up every other request for seconds."""
    shape, num_choices = shape_class(tokenizer), 20
    entries = [TokenLogprobs(5 + i, -3.0 - i, 9, ((6, -0.5), (7, -1.0))) for i in range(5)]
    choices = [WholeChoice(shape) for _ in range(num_choices)]
    for choice in choices:
        choice.add(TextChunk(0, "ab", (5, 6), tuple(entries[:2]), (0, 1)), None)
        choice.add(TextChunk(0, "", ()), None)
        choice.add(TextChunk(0, "cde", (7, 8, 9), tuple(entries[2:]), (2, 3, 4)), None)
    async with counting_turns() as num_turns:
        body = json.loads(await whole_response(shape, Envelope("id", "model", 0), choices, num_choices, Usage(), {}))
        assert num_turns() >= num_choices - 1
    assert [choice["logprobs"] for choice in body["choices"]] == [shape.logprobs(entries, range(5))] * num_choices


async def test_long_logprobs_are_copied_only_once(tokenizer: Tokenizer) -> None:
    """They may have tens of megabytes, and each copy keeps the event loop waiting."""
    shape, envelope = CompletionFormat(tokenizer), Envelope("id", "model", 0)
    echo = Echo("a", dict.fromkeys(("tokens", "token_logprobs", "top_logprobs", "text_offset"), b"1,2" * 50_000))
    entry = TokenLogprobs(5, -3.0, 9, tuple((6 + i, -0.5) for i in range(20)))
    chunk = TextChunk(0, "b", (5,), (entry,), (0,))
    choices = [WholeChoice(shape) for _ in range(3)]
    for choice in choices:
        choice.begin_with(echo)
        for _ in range(500):
            choice.add(chunk, None)
    with tracing_peak() as most_bytes:
        body = await whole_response(shape, envelope, choices, 3, Usage(), {})
        assert most_bytes() < 1.5 * len(body)
    assert body.count(echo.logprobs["tokens"]) == 4 * len(choices)
    with tracing_peak() as most_bytes:
        events = StreamFormatter(shape, envelope, include_usage=False).chunk(0, echo, chunk, None)
        assert most_bytes() < 1.5 * len(events)
    assert events.count(echo.logprobs["tokens"]) == 4


@pytest.mark.parametrize("texts", [None, ["a", "\u2028", '"'] * (7 * ITEMS_AT_A_TIME**2)])
async def test_the_loop_turns_while_the_tokens_of_a_long_text_are_encoded(texts: list[str] | None) -> None:
    """In one piece, those of megabytes would hold up every other request for seconds."""
    token_ids = list(range(20 * ITEMS_AT_A_TIME**2 + 1))
    async with counting_turns() as num_turns:
        body = await tokens_response(token_ids, texts, max_model_len=9)
        assert num_turns() >= (20 if texts is None else 41)
    expected = {"count": len(token_ids), "max_model_len": 9, "tokens": token_ids}
    assert json.loads(body) == (expected if texts is None else expected | {"token_strs": texts})
