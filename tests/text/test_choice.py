"""The text, offsets and stop strings of one output."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from kvrelay.core.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.text.choice import Choice
from kvrelay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizer import sentencepiece_like


def test_the_text_behind_a_prompt_is_that_of_its_tokens() -> None:
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like())  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer(wrapped)
    logprobs = tuple(TokenLogprobs(token_id, -0.5, 1, ()) for token_id in (2, 1))
    output = TokenOutput(0, (2, 1), logprobs, FinishReason.LENGTH)
    chunk = Choice(tokenizer, SamplingParams(), (1, 1)).consume(output)
    assert chunk.text == "".join(map(tokenizer.token_text, output.token_ids)) == " world hello"
    assert chunk.text_offsets == (0, len(" world"))
    stopped = Choice(tokenizer, SamplingParams(stop=(" world",)), (1, 1)).consume(output)
    assert (stopped.text, stopped.stop_reason) == ("", " world")
