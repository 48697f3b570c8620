"""The requests of the clients: a fixed set with shared prefixes, in both protocols.

The set is fixed because the undisturbed cluster answers each of them first, which gives the right answers.
"""

from typing import Any

from tests.chaos.streams import Ask, Protocol
from tests.e2e.cluster import BLOCK_SIZE, some_token_ids

_PREFIX_BLOCKS = (1, 4, 9)
_SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    "two": {"temperature": 0.9, "seed": 11, "n": 2},
    "penalised": {"temperature": 0.7, "seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.1},
}
_LOGPROBS = {"logprobs": 1}  # the same name in both protocols, but only gRPC's are compared


def catalogue(*, max_tokens: int) -> list[Ask]:
    """Returns requests for every prefix with every sampling, with outputs of `max_tokens / 2` to `max_tokens` tokens.
    Every third one goes over HTTP; of the others every second one has log-probabilities."""
    asks = []
    for number, (blocks, name) in enumerate((blocks, name) for blocks in _PREFIX_BLOCKS for name in _SAMPLINGS):
        prompt = [*some_token_ids(blocks * BLOCK_SIZE, seed=blocks), *some_token_ids(3 + 5 * number, seed=100 + number)]
        over_http = number % 3 == 2
        with_logprobs = not over_http and number % 2 == 0
        asks.append(
            Ask(
                f"{name} after {blocks} blocks",
                tuple(prompt),
                max_tokens // 2 + (number * 37) % (max_tokens // 2),
                _SAMPLINGS[name] | (_LOGPROBS if with_logprobs else {}),
                Protocol.HTTP if over_http else Protocol.GRPC,
            )
        )
    return asks
