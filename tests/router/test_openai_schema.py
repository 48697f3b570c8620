"""Bodies of the OpenAI API: what is read of a wrong one."""

import json

import pytest
from pydantic import ValidationError

from kvrelay.core.errors import InvalidRequestError
from router.edge.openai_schema import ChatBody, CompletionBody, GenerationBody
from router.edge.validation import MAX_MESSAGES

MESSAGE = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("cls", "field", "values", "num_errors"),
    [
        (CompletionBody, "stop", [5] * 1000, 2),  # one of them: it is no string either
        (CompletionBody, "stop_token_ids", ["5"] * 1000, 1),
        (ChatBody, "messages", [5] * 1000, 1),
        (ChatBody, "messages", [MESSAGE] * MAX_MESSAGES + [{}] * 1000, 1),
    ],
)
def test_a_list_is_read_up_to_its_first_wrong_element(
    cls: type[GenerationBody], field: str, values: list[object], num_errors: int
) -> None:
    """Each error costs a kilobyte and microseconds, and a body has room for millions of elements."""
    with pytest.raises(ValidationError) as refused:
        cls.model_validate_json(json.dumps({field: values}))
    assert refused.value.error_count() == num_errors
    with pytest.raises(InvalidRequestError, match=field):
        cls.parse(json.dumps({field: values}).encode())


@pytest.mark.parametrize("wrong", ["1", True, None, []])
def test_biases_are_read_up_to_the_first_wrong_one(wrong: object) -> None:
    body = CompletionBody.parse(json.dumps({"logit_bias": {"5": 1, "6": wrong, "no id": 1}}).encode())
    with pytest.raises(InvalidRequestError, match="the bias of '6' is not a number") as refused:
        body.sampling(logprobs=None)
    assert refused.value.field == "logit_bias"
