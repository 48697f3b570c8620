"""Which ids are tokens of a vocabulary, and what an error says of one that is not."""

import pytest

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.token_ids import check_token_ids


def test_any_id_of_the_vocabulary_is_a_token() -> None:
    check_token_ids([0, 99], 100, field="prompt")
    check_token_ids([], 100, field="prompt")


def test_an_error_names_the_first_other_id_and_whose_it_is() -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt: token id 100 .* of 100") as refused:
        check_token_ids([5, 100, -1], 100, field="prompt")
    assert refused.value.field == "prompt"
    with pytest.raises(InvalidRequestError, match=r"^prompt 3: token id -1") as refused:
        check_token_ids([-1], 9, field="prompts", name="prompt 3")
    assert refused.value.field == "prompts"
