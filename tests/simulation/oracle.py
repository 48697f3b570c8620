"""What a request's tokens must be, and what their KV must be, computed without a cluster.

The KV of a token is a digest over all tokens up to it, and the token itself. A sampled token is a function of all KV
before it, the seed and the output's index. So a single wrong byte anywhere in a sequence's KV changes its next token,
as in a model.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.core.outputs import FinishReason
from kvrelay.core.sampling_params import SamplingParams

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


def sample(slots: bytes, params: SamplingParams, index: int) -> int:
    """Returns the token that follows the tokens with this KV."""
    suffix = f"{params.seed}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(slots + suffix, digest_size=4).digest(), "little") % VOCAB_SIZE


def expected_output(prompt: Sequence[int], params: SamplingParams, index: int, max_model_len: int) -> ExpectedOutput:
    """Returns the output as the engine ends it: with a stop token or by length."""
    slots = slots_of(prompt)
    tokens: list[int] = []
    while True:
        token_id = sample(slots, params, index)
        tokens.append(token_id)
        if token_id in params.stop_token_ids or (token_id == EOS_TOKEN_ID and not params.ignore_eos):
            return ExpectedOutput(tuple(tokens), FinishReason.STOP)
        if len(tokens) >= params.max_tokens or len(prompt) + len(tokens) >= max_model_len:
            return ExpectedOutput(tuple(tokens), FinishReason.LENGTH)
        slots += next_slot(slots[-SLOT_BYTES:], token_id)
