"""The text, offsets and stop strings of one output."""

import pytest

from kvrelay.core.generation.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.text.choice import Choice
from kvrelay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizer import sentencepiece_like


def test_the_text_behind_a_prompt_is_that_of_its_tokens() -> None:
    tokenizer = sentencepiece_like()
    logprobs = tuple(TokenLogprobs(token_id, -0.5, 1, ()) for token_id in (2, 1))
    output = TokenOutput(0, (2, 1), logprobs, FinishReason.LENGTH)
    chunk = Choice(tokenizer, SamplingParams(), (1, 1)).consume(output)
    assert chunk.text == "".join(map(tokenizer.token_text, output.token_ids)) == " world hello"
    assert chunk.text_offsets == (0, len(" world"))
    stopped = Choice(tokenizer, SamplingParams(stop=(" world",)), (1, 1)).consume(output)
    assert (stopped.text, stopped.stop_reason) == ("", " world")


async def test_a_token_begins_behind_a_character_that_it_does_not_complete(tokenizer: Tokenizer) -> None:
    first, second, third, after = await ids(tokenizer, "你", "a")
    logprobs = tuple(TokenLogprobs(token_id, -0.5, 1, ()) for token_id in (first, second, after, first, second, third))
    token_ids = tuple(entry.token_id for entry in logprobs)
    chunk = Choice(tokenizer, SamplingParams(), ()).consume(TokenOutput(0, token_ids, logprobs, FinishReason.LENGTH))
    assert (chunk.text, chunk.text_offsets) == ("\ufffda你", (0, 0, 1, 2, 2, 2))


async def ids(tokenizer: Tokenizer, *texts: str) -> list[int]:
    """Returns the tokens of texts that are one token each."""
    return [token_id for text in texts for token_id in await tokenizer.encode(text, add_special_tokens=False)]


async def test_what_comes_after_a_stop_string_is_not_the_choice_s_whatever_ended_it(tokenizer: Tokenizer) -> None:
    token_ids = await ids(tokenizer, *"abcd")
    assert len(token_ids) == 4
    logprobs = tuple(TokenLogprobs(token_id, -0.5, 1, ()) for token_id in token_ids)
    for reason, stop_token_id in ((FinishReason.LENGTH, None), (FinishReason.STOP, token_ids[-1])):
        choice = Choice(tokenizer, SamplingParams(stop=("b",)), ())
        chunk = choice.consume(TokenOutput(0, tuple(token_ids), logprobs, reason, stop_token_id))
        assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("a", FinishReason.STOP, "b")
        assert (chunk.token_ids, chunk.logprobs) == (tuple(token_ids[:2]), logprobs[:2])
        assert choice.finished and not choice.ended_early


async def test_a_stop_string_of_the_last_token_that_must_come_is_text(tokenizer: Tokenizer) -> None:
    token_ids = await ids(tokenizer, *"bbb")
    choice = Choice(tokenizer, SamplingParams(stop=("b",), min_tokens=2), ())
    chunk = choice.consume(TokenOutput(0, tuple(token_ids)))
    assert (chunk.text, chunk.token_ids, choice.ended_early) == ("bb", tuple(token_ids), True)


@pytest.mark.parametrize("text", ["xaab", "aaab", "aabaab"])
async def test_a_stop_string_may_begin_among_the_tokens_that_must_come(tokenizer: Tokenizer, text: str) -> None:
    token_ids = await ids(tokenizer, *text)
    choice = Choice(tokenizer, SamplingParams(stop=("aab",), min_tokens=len(text) - 1), ())
    chunk = choice.consume(TokenOutput(0, tuple(token_ids)))
    assert (chunk.text, chunk.stop_reason) == (text[:-3], "aab")


async def test_what_was_held_back_comes_with_the_end(tokenizer: Tokenizer) -> None:
    """An incomplete character, and the beginning of a stop string."""
    whole = await ids(tokenizer, "你")
    assert len(whole) == 3
    for stop, token_ids, text in (((), whole[:2], "\ufffd"), (("bc",), await ids(tokenizer, "b"), "b")):
        choice = Choice(tokenizer, SamplingParams(stop=stop), ())
        assert choice.consume(TokenOutput(0, tuple(token_ids))).text == ""
        last = choice.consume(TokenOutput(0, (), finish_reason=FinishReason.LENGTH))
        assert (last.text, last.finish_reason) == (text, FinishReason.LENGTH)
