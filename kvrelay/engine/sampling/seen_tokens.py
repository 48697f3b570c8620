"""What penalties read of a sequence: its distinct tokens, and how often each is in the output.

A prompt has thousands of tokens and a step adds one, so this is kept from step to step. Invariant: each token is there
once, in the order of first appearance, prompt first.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class SeenTokens:
    """The distinct tokens of a prompt and of the output so far. Penalties that disregard the prompt are given an empty
    one."""

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._token_ids = np.fromiter(self._places, dtype=np.int64, count=len(self._places))
        self._counts = np.zeros_like(self._token_ids)
        self.num_output_tokens = 0

    @property
    def token_ids(self) -> Integers:
        """Returns the distinct tokens, `[num_distinct]`: memory that stays as it is until the next `add`."""
        return self._token_ids[: len(self._places)]

    @property
    def output_counts(self) -> Integers:
        """Returns how often each of `token_ids` is in the output. Also valid until the next `add`."""
        return self._counts[: len(self._places)]

    def add(self, output_token_ids: Iterable[int]) -> None:
        """Adds the next tokens of the output."""
        for token_id in output_token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._token_ids):
                self._make_room()
            self._token_ids[place] = token_id
            self._counts[place] += 1
            self.num_output_tokens += 1

    def copy(self) -> "SeenTokens":
        """Returns a copy to which other tokens can be added."""
        other = SeenTokens()
        other._places = self._places.copy()
        other._token_ids = self._token_ids.copy()
        other._counts = self._counts.copy()
        other.num_output_tokens = self.num_output_tokens
        return other

    def _make_room(self) -> None:
        more = np.zeros(max(64, len(self._token_ids) // 2), dtype=np.int64)
        self._token_ids = np.concatenate((self._token_ids, more))
        self._counts = np.concatenate((self._counts, more))
