"""Log-probabilities of prompts as JSON, in vLLM's form, and how many of them one answer may have.

A prompt may have many thousands of tokens, with 20 others for each. Invariant: the event loop turns after a few of
them, and all choices share what is encoded.
"""

import json
from collections.abc import Iterable, Sequence
from functools import partial

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.turns import in_turns
from kvrelay.text.tokenizer import Tokenizer
from router.edge.openai_format import finite
from router.request import RoutedRequest

# Of one answer, each of about 70 bytes. From a node they come in one message, where each takes at most 12 bytes.
MAX_ENTRIES = 2**20


def check_prompt_logprobs(
    requests: Sequence[RoutedRequest], *, num_copies: int, field: str = "prompt_logprobs"
) -> None:
    """Raises InvalidRequestError if one answer would have too many entries for these requests, which differ only in
    their prompts. It has those of each prompt `num_copies` times. `field` is the client's name for how many it wants
    of each token."""
    num_likeliest = requests[0].sampling.prompt_logprobs
    if num_likeliest is None:
        return
    num_tokens = num_copies * sum(len(request.prompt_token_ids) for request in requests)
    num_entries = num_tokens * (num_likeliest + 1)
    if num_entries > MAX_ENTRIES:
        raise InvalidRequestError(
            f"{field} of {num_likeliest} would make {num_entries} entries for prompts in one answer, at most "
            f"{MAX_ENTRIES} are allowed: ask for fewer of them, for fewer prompts at a time, or for an n of 1",
            field=field,
        )


async def encoded_prompt_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> bytes:
    """Returns a list: null for the first prompt token, then an object from token id to entry for each."""
    pieces = await in_turns(partial(_encoded, tokenizer), entries)
    return b"".join((b"[null", *pieces, b"]"))  # there may be 70 MB of them: copied once, in one turn of the event loop


def _encoded(tokenizer: Tokenizer, entry: TokenLogprobs) -> bytes:
    """Returns a comma and the object of one token."""

    def one(token_id: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    ranked = {token_id: one(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)}
    ranked[entry.token_id] = one(entry.token_id, entry.logprob, entry.rank)
    return b",%b" % json.dumps(ranked, ensure_ascii=False, separators=(",", ":")).encode()
