"""What the HTTP gateway refuses: wrong fields, and bodies that are no requests."""

import gzip
import json
import re

import openai
import pytest

from kvrelay.core.errors import DeadlineError, GivenUpError, KVRelayError, OverloadedError
from router.edge import http_generation
from router.edge.openai_schema import MAX_PROMPTS
from router.edge.validation import MAX_CHAT_TEMPLATE_KWARGS_CHARS
from tests.router.edge.edge_parts import MAX_MODEL_LEN, MODEL
from tests.router.edge.gateway_client import CHAT, COMPLETION, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for the whole file


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""], "add_special_tokens": False}, "prompt"),
        ({"prompt": [1, "two"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [-1], "echo": True}, "prompt"),
        ({"prompt": [[5], [2**40]], "echo": True}, "prompt"),
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": ["x"] * 1000}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "0.7"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 10**400}, "n"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": 10**400}, "logprobs"),
        ({"prompt_logprobs": 10**400}, "prompt_logprobs"),
        ({"prompt": [[5] * 250] * 4, "n": 64, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        *(({"logit_bias": {key: 1}}, "logit_bias") for key in ("the", "", "5_0", " 5", "\u0665", "9" * 5000)),
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
        ({"seed": 2**65}, "seed"),
        ({"suffix": "end"}, "suffix"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"best_of": 3}, "best_of"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"style": "terse"}}, "chat_template_kwargs"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["capital"]}, "bad_words"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_a_bad_completion_request_names_its_field(
    gateway: Gateway, change: dict[str, object], param: str
) -> None:
    await expect_refusal(gateway, "/v1/completions", COMPLETION | change, param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 128 * MAX_MODEL_LEN}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "assistant", "content": "I begin"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": "Hi"}, "prompt"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"chat_template_kwargs": ["style"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"style": "x" * MAX_CHAT_TEMPLATE_KWARGS_CHARS}}, "chat_template_kwargs"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["capital"]}, "bad_words"),
    ],
)
async def test_a_bad_chat_request_names_its_field(gateway: Gateway, change: dict[str, object], param: str) -> None:
    await expect_refusal(gateway, "/v1/chat/completions", CHAT | change, param)


async def expect_refusal(gateway: Gateway, path: str, body: dict[str, object], param: str) -> None:
    response = await gateway.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert param in error["message"]
    assert "\n" not in error["message"]
    assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", COMPLETION | {"prompt": [5] * MAX_MODEL_LEN}, f"has {MAX_MODEL_LEN} tokens"),
        ("/v1/completions", COMPLETION | {"prompt": [[5], [5] * MAX_MODEL_LEN]}, f"has {MAX_MODEL_LEN} tokens"),
        ("/v1/completions", COMPLETION | {"prompt": [5] * 250, "max_tokens": 7}, "max_tokens may be at most 6"),
        ("/v1/completions", COMPLETION | {"prompt": "x" * 129 * MAX_MODEL_LEN}, f"{129 * MAX_MODEL_LEN} characters"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 10**6}, "max_completion_tokens may be at most"),
    ],
)
async def test_clients_recognise_that_they_have_to_shorten_a_conversation(
    gateway: Gateway, path: str, body: dict[str, object], words: str
) -> None:
    """Some look for the code, others, such as LiteLLM, for OpenAI's words."""
    error = (await gateway.post(path, body)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens, but ")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([5] * MAX_MODEL_LEN, f"prompt[2] has {MAX_MODEL_LEN} tokens"),
        ("hello " * MAX_MODEL_LEN, "prompt[2] has "),
        ("x" * 129 * MAX_MODEL_LEN, f"prompt[2] has {129 * MAX_MODEL_LEN} characters"),
        ([5, 10**9], f"prompt[2]: token id {10**9} is outside the vocabulary"),
        ([], "prompt[2] must not be empty"),
        ("", "prompt[2] must not be empty"),
    ],
    ids=["tokens", "tokens of a text", "characters", "vocabulary", "no tokens", "no text"],
)
async def test_of_a_list_of_prompts_the_wrong_one_is_named(gateway: Gateway, wrong: object, words: str) -> None:
    right: object = "hello" if isinstance(wrong, str) else [5]
    body = COMPLETION | {"prompt": [right, right, wrong, right], "add_special_tokens": False}
    error = (await gateway.post("/v1/completions", body)).json()["error"]
    assert error["param"] == "prompt"
    assert words in error["message"]


async def test_the_prompt_of_a_list_that_leaves_too_little_for_max_tokens_is_named(gateway: Gateway) -> None:
    body = COMPLETION | {"prompt": [[5], [5] * 250], "max_tokens": 7}
    error = (await gateway.post("/v1/completions", body)).json()["error"]
    assert error["param"] == "max_tokens"
    assert "250 tokens of prompt[1] and max_tokens of 7 are more" in error["message"]


async def test_harmless_values_of_unsupported_fields_are_accepted(gateway: Gateway) -> None:
    body = {**CHAT, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "functions": None}
    more = {"bad_words": [], "best_of": 1, "logprobs": False, "top_logprobs": 0}
    assert (await gateway.post("/v1/chat/completions", {**body, **more})).status_code == 200


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/vnd.api+json"])
async def test_every_name_of_json_is_understood(gateway: Gateway, content_type: str) -> None:
    body, headers = json.dumps(COMPLETION), {"content-type": content_type}
    assert (await gateway.http.post("/v1/completions", content=body, headers=headers)).status_code == 200


async def test_as_many_prompts_and_bytes_as_are_allowed_are_answered(gateway: Gateway) -> None:
    body = json.dumps(COMPLETION | {"prompt": ["x"] * MAX_PROMPTS, "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    for missing, status in ((0, 200), (-1, 413)):
        data = body.ljust((1 << 20) - missing)
        assert (await gateway.http.post("/v1/completions", content=data, headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("data", "headers", "status", "words"),
    [
        (b'{"model": ', {}, 400, "valid JSON"),
        (b"", {}, 400, "valid JSON"),
        (b'{"prompt": "\xff\xfe"}', {}, 400, "valid JSON"),
        (b'{"prompt": "\\ud800"}', {}, 400, "valid JSON"),
        (b"[" * 100_000, {}, 400, "valid JSON"),
        (b"[]", {}, 400, "JSON object"),
        (b"null", {}, 400, "JSON object"),
        (b"{}", {"content-type": "text/plain"}, 415, "application/json"),
        (gzip.compress(b"{}"), {"content-encoding": "gzip"}, 415, "without content-encoding gzip"),
        (b"\x00junk" * 400_000, {}, 413, "1048576"),
    ],
)
async def test_a_body_that_is_no_request_is_refused_with_the_reason(
    gateway: Gateway, data: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    response = await gateway.http.post(
        "/v1/completions", content=data, headers={"content-type": "application/json"} | headers
    )
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    assert response.headers["x-request-id"]
    assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200


@pytest.mark.parametrize(
    ("error", "num_sent"),
    [(DeadlineError("too long"), 1), (GivenUpError("nodes ended"), 1), (OverloadedError("full"), 2)],
)
async def test_openai_s_client_does_not_send_again_what_would_fail_again(
    gateway: Gateway, error: KVRelayError, num_sent: int
) -> None:
    gateway.relay.fail_with = error
    with pytest.raises(openai.APIStatusError, match=str(error)):
        await gateway.openai.with_options(max_retries=1).completions.create(model=MODEL, prompt="x")
    assert len(gateway.relay.requests) == num_sent


async def _num_ended(gateway: Gateway) -> float:
    """Returns how many requests have ended, in whatever way: each counts once."""
    text = (await gateway.http.get("/metrics")).text
    return sum(map(float, re.findall(r"^kvrelay:request_(?:success|errors)_total{.*} (.*)$", text, re.MULTILINE)))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", COMPLETION, "max_tokens"),
        ("/v1/completions", COMPLETION | {"logprobs": 2}, "logprobs"),
        ("/v1/chat/completions", CHAT | {"logprobs": True}, "logprobs"),
    ],
)
async def test_an_answer_that_gets_too_long_is_refused_unless_it_is_streamed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object], param: str
) -> None:
    size = len((await gateway.post(path, body)).content)
    monkeypatch.setattr(http_generation, "MAX_WHOLE_BYTES", size)
    assert (await gateway.post(path, body)).status_code == 200
    monkeypatch.setattr(http_generation, "MAX_WHOLE_BYTES", 5)
    before = await _num_ended(gateway)
    refused = await gateway.post(path, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert gateway.relay.closed.is_set() and await _num_ended(gateway) == before + 1
    assert (await gateway.post(path, body | {"stream": True})).status_code == 200


async def test_of_an_unknown_path_little_is_repeated(gateway: Gateway) -> None:
    response = await gateway.http.get(f"/{'x' * 30_000}")
    assert response.status_code == 404
    assert len(response.json()["error"]["message"]) < 200


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions/"), ("GET", "/livez/"), ("GET", "/metrics/")])
async def test_a_path_with_a_slash_too_many_is_unknown_and_leads_nowhere_else(
    gateway: Gateway, method: str, path: str
) -> None:
    response = await gateway.http.request(method, path, headers={"host": "elsewhere.example"}, json=COMPLETION)
    assert response.status_code == 404
    assert "location" not in response.headers
    assert path in response.json()["error"]["message"]
