"""What a request's tokens must be, and what their KV must be, computed without a cluster.

The KV of a token is a digest over all tokens up to it, and the token itself. A sampled token is a function of all KV
before it, the output's index and everything that a runner reads of the sampling parameters. So a single wrong byte
anywhere in a sequence's KV changes its next token, as in a model, and so does a parameter that was lost on the way.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrelay.core.generation.outputs import FinishReason
from kvrelay.core.generation.sampling_params import SamplingParams

VOCAB_SIZE = 64
EOS_TOKEN_ID = 0
SLOT_BYTES = 16
_TOKEN_BYTES = 4  # the last ones of a slot
FIRST_STATE = bytes(SLOT_BYTES)


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


def next_slot(previous: bytes, token_id: int) -> bytes:
    """Returns the KV of a token that follows one with the given KV."""
    token = token_id.to_bytes(_TOKEN_BYTES, "little")
    return hashlib.blake2b(previous + token, digest_size=SLOT_BYTES - _TOKEN_BYTES).digest() + token


def tokens_in(slots: bytes) -> list[int]:
    """Returns the tokens that have left this KV, if it is right."""
    ends = range(SLOT_BYTES, len(slots) + 1, SLOT_BYTES)
    return [int.from_bytes(slots[end - _TOKEN_BYTES : end], "little") for end in ends]


def slots_of(token_ids: Sequence[int]) -> bytes:
    """Returns the KV of all tokens, `SLOT_BYTES` bytes each."""
    slots, state = [], FIRST_STATE
    for token_id in token_ids:
        state = next_slot(state, token_id)
        slots.append(state)
    return b"".join(slots)


def sample(
    slots: bytes, params: SamplingParams, index: int, *, num_output_tokens: int, seen: Mapping[int, int] | None
) -> int:
    """Returns the token that follows the tokens with this KV. `seen`: what penalties read, the tokens and how often
    each is in the output; None without a penalty."""
    read = (
        *(params.seed, params.temperature, params.top_k, params.top_p, params.min_p),
        *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
        sorted(params.biases),
    )
    drawn = f"{index}/{read}/{None if seen is None else sorted(seen.items())}".encode()
    banned = _ends(params) if num_output_tokens < params.min_tokens else ()
    number = 0
    while True:
        digest = hashlib.blake2b(slots + drawn + bytes([number]), digest_size=4).digest()
        token_id = int.from_bytes(digest, "little") % VOCAB_SIZE
        if token_id not in banned:
            return token_id
        number += 1


def expected_output(prompt: Sequence[int], params: SamplingParams, index: int) -> ExpectedOutput:
    """Returns the output as the engine ends it: with a stop token or by length."""
    slots = slots_of(prompt)
    tokens: list[int] = []
    while True:
        seen = _seen(prompt, tokens, params)
        token_id = sample(slots, params, index, num_output_tokens=len(tokens), seen=seen)
        tokens.append(token_id)
        if token_id in _ends(params):
            return ExpectedOutput(tuple(tokens), FinishReason.STOP)
        if len(tokens) >= params.max_tokens:
            return ExpectedOutput(tuple(tokens), FinishReason.LENGTH)
        slots += next_slot(slots[-SLOT_BYTES:], token_id)


def _ends(params: SamplingParams) -> tuple[int, ...]:
    """Returns the tokens that end an output."""
    return (*params.stop_token_ids, *(() if params.ignore_eos else (EOS_TOKEN_ID,)))


def _seen(prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> Mapping[int, int] | None:
    """Returns what penalties read; the repetition penalty alone regards the prompt."""
    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0):
        return None
    in_prompt = prompt if params.repetition_penalty != 1.0 else ()
    return {**dict.fromkeys(in_prompt, 0), **Counter(tokens)}
