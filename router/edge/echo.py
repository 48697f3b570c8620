"""Prompts that are repeated before their outputs: their texts, and their log-probabilities in OpenAI's form.

Invariant: the event loop turns after a few tokens, and all choices of a prompt share what is encoded.
"""

import asyncio
from collections.abc import Sequence

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.turns import in_turns
from kvrelay.text.text_stream import ByteStream
from kvrelay.text.tokenizer import Tokenizer
from router.edge.openai_format import CompletionFormat, Echo, to_json
from router.edge.validation import TextPrompt, TokenPrompt

# Of one answer. With an `n` of 128, that to a body of a few megabytes would otherwise have more than a gigabyte.
MAX_CHARS = 2**26


async def echoes(
    tokenizer: Tokenizer, prompts: Sequence[TextPrompt | TokenPrompt], *, num_copies: int = 1
) -> list[Echo]:
    """Returns the prompts as texts, without log-probabilities. Raises InvalidRequestError if one answer would have too
    many characters with `num_copies` of each."""
    found: list[Echo] = []
    num_chars = 0
    for prompt in prompts:
        if isinstance(prompt, TextPrompt):
            found.append(Echo(prompt.text))
        else:
            found.append(Echo(await tokenizer.decode_long(prompt.token_ids, skip_special_tokens=False)))
            await asyncio.sleep(0)  # a hundred of them may be long
        num_chars += num_copies * len(found[-1].text)
        if num_chars > MAX_CHARS:
            raise InvalidRequestError(
                f"echo would repeat more than {MAX_CHARS} characters of prompts in one answer: ask for fewer prompts "
                "at a time, or for an n of 1",
                field="echo",
            )
    return found


async def encoded_logprobs(
    tokenizer: Tokenizer, echo: Echo, token_ids: Sequence[int], found: PromptLogprobs
) -> dict[str, bytes]:
    """Returns the encoded items of each list for all tokens of a prompt. The first one has no log-probabilities."""
    logprobs = CompletionFormat(tokenizer).logprobs
    offsets = await _text_offsets(tokenizer, echo.text, token_ids)

    def one(token: tuple[TokenLogprobs, int]) -> dict[str, bytes]:
        entry, offset = token
        return {name: to_json(items)[1:-1].encode() for name, items in logprobs((entry,), (offset,)).items()}

    first = {
        "tokens": to_json(tokenizer.token_text(token_ids[0])).encode(),
        "token_logprobs": b"null",
        "top_logprobs": b"null",
        "text_offset": b"0",
    }
    tokens = [first, *await in_turns(one, zip(found, offsets[1:], strict=True))]
    encoded: dict[str, bytes] = {}
    for name in first:
        encoded[name] = b",".join([token[name] for token in tokens])
        await asyncio.sleep(0)
    return encoded


async def _text_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[int]:
    """Returns where in the prompt's text each token begins: behind the texts of those before it, which where the
    tokenizer changes the text first are not the prompt's, but never behind its end. A special token that the tokenizer
    has added has no text there, nor has a space in front that its decoder drops."""

    def has_text(token_id: int, start: int) -> bool:
        piece = tokenizer.token_text(token_id)
        return piece != "" and (token_id not in tokenizer.special_token_ids or text.startswith(piece, start))

    stream = ByteStream(tokenizer, skip_special_tokens=False)
    first = next((token_id for token_id in token_ids if has_text(token_id, 0)), None)
    if first is not None and tokenizer.decode([first], skip_special_tokens=False) == tokenizer.token_text(first)[1:]:
        stream.num_chars = -1

    def offset_of(token_id: int) -> int:
        start = min(max(0, stream.start_of(token_id)), len(text))
        if not has_text(token_id, start):
            return min(max(0, stream.num_chars), len(text))
        stream.push(token_id)
        return start

    return await in_turns(offset_of, token_ids)
