"""Whether token ids are those of a vocabulary."""

from collections.abc import Sequence

from kvrelay.core.errors import InvalidRequestError


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, field: str, name: str | None = None) -> None:
    """Raises InvalidRequestError with the first id outside the vocabulary. `name`, which is `field` if not given, says
    whose it is."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{name or field}: token id {wrong} is outside the vocabulary of {vocab_size}", field=field
        )
