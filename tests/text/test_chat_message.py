"""A message is accepted or refused alike, and for the same reason, over HTTP and by `LLM.chat`."""

import json

import pytest

from kvrelay.core.errors import InvalidRequestError
from kvrelay.offline.prompts import chat_messages
from router.edge.openai_schema import ChatBody

HELLO: dict[str, object] = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (HELLO, "hello"),
        ({"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}, "one\ntwo"),
        ({"role": "user", "content": []}, ""),
        (HELLO | {"name": "ann", "refusal": None, "annotations": [], "tool_call_id": "1"}, "hello"),
        (HELLO | {"reasoning_content": "It is a greeting.", "nobody_knows": {"this": 1}}, "hello"),
        (HELLO | {"tool_calls": [], "function_call": None, "audio": {}}, "hello"),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_only_the_role_and_the_text_of_a_message_reach_the_template(
    role: str, message: dict[str, object], content: str
) -> None:
    messages = [HELLO, message | {"role": role}]
    expected: list[object] = [HELLO, {"role": role, "content": content}]
    assert ChatBody.parse(json.dumps({"messages": messages}).encode()).chat_prompt().messages == expected
    assert chat_messages(messages) == expected


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, ": tool_calls is not supported here"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, ": function_call is not supported"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, ": audio is not supported here"),
        ({"role": "user"}, ": content must be a string or a list of text parts"),
        ({"role": "user", "content": 5}, ": content must be a string or a list of text parts"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ": content[0] must be a part of type"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, ".role"),
        ({"role": "User", "content": "x"}, ".role"),
        ({"role": None, "content": "x"}, "role"),
        ({"content": "x"}, "role"),
    ],
)
def test_what_is_refused_is_refused_alike(message: dict[str, object], reason: str) -> None:
    messages = [HELLO, message]
    with pytest.raises(InvalidRequestError) as over_http:
        ChatBody.parse(json.dumps({"messages": messages}).encode())
    with pytest.raises(InvalidRequestError) as offline:
        chat_messages(messages)
    for refused in (over_http.value, offline.value):
        assert refused.field == "messages"
        assert str(refused).startswith("messages[1]") and reason in str(refused)
