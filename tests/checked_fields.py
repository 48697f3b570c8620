"""Which fields of sampling parameters were checked for token ids outside the vocabulary, each time it was done."""

from collections.abc import Sequence

import pytest

from kvrelay.core.generation import sampling_params
from kvrelay.core.generation.token_ids import check_token_ids


def note_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the list to which the fields are added from now on."""
    checked: list[str] = []

    def noted(token_ids: Sequence[int], vocab_size: int, *, field: str) -> None:
        checked.append(field)
        check_token_ids(token_ids, vocab_size, field=field)

    monkeypatch.setattr(sampling_params, "check_token_ids", noted)
    return checked
