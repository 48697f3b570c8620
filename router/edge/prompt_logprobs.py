"""Log-probabilities of prompts as JSON, in vLLM's form.

A prompt may have many thousands of tokens, with 20 others for each. Invariant: the event loop turns after a few of
them, and all choices share what is encoded.
"""

import asyncio
import json
from collections.abc import Sequence

from kvrelay.core.outputs import TokenLogprobs
from kvrelay.text.tokenizer import Tokenizer
from router.edge.openai_format import finite

TOKENS_AT_A_TIME = 64


async def encoded(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> bytes:
    """Returns a list: null for the first prompt token, then an object from token id to entry for each."""
    pieces = ["[null"]
    for start in range(0, len(entries), TOKENS_AT_A_TIME):
        pieces += [f",{_encoded(tokenizer, entry)}" for entry in entries[start : start + TOKENS_AT_A_TIME]]
        await asyncio.sleep(0)
    return "".join((*pieces, "]")).encode()


def _encoded(tokenizer: Tokenizer, entry: TokenLogprobs) -> str:
    def one(token_id: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    ranked = {token_id: one(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)}
    ranked[entry.token_id] = one(entry.token_id, entry.logprob, entry.rank)
    return json.dumps(ranked, ensure_ascii=False, separators=(",", ":"))
