"""Tokens of texts and chats, and texts of tokens, over HTTP."""

import pytest

from tests.router.edge.edge_parts import MAX_MODEL_LEN, MODEL
from tests.router.edge.gateway_client import CHAT, COMPLETION, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for the whole file

TEXT = {"model": MODEL, "prompt": "hello 你好"}


async def test_a_text_is_the_text_of_its_tokens(gateway: Gateway) -> None:
    answer = (await gateway.post("/tokenize", TEXT)).json()
    tokens = answer["tokens"]
    assert answer == {"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens}
    assert (await gateway.post("/detokenize", {"model": MODEL, "tokens": tokens})).json() == {"prompt": "<s>hello 你好"}
    assert (await gateway.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}
    bare = (await gateway.post("/tokenize", {**TEXT, "add_special_tokens": False, "return_token_strs": True})).json()
    assert bare["tokens"] == tokens[1:]
    assert len(bare["token_strs"]) == len(bare["tokens"]) and bare["token_strs"][:2] == ["hello", "Ġ"]
    assert "".join(bare["token_strs"]) == "helloĠä½łå¥½", "as the vocabulary writes it, like vLLM's"


async def test_a_text_may_have_no_tokens(gateway: Gateway) -> None:
    empty = {"prompt": "", "return_token_strs": True}
    answer = (await gateway.post("/tokenize", {**empty, "add_special_tokens": False})).json()
    assert answer == {"count": 0, "max_model_len": MAX_MODEL_LEN, "tokens": [], "token_strs": []}
    assert (await gateway.post("/tokenize", empty)).json()["count"] == 1


async def test_a_chat_has_the_tokens_that_are_generated_from(gateway: Gateway) -> None:
    tokens = (await gateway.post("/tokenize", CHAT)).json()["tokens"]
    await gateway.post("/v1/chat/completions", CHAT)
    assert tuple(tokens) == gateway.relay.requests[-1].prompt_token_ids
    assert (await gateway.post("/tokenize", {**CHAT, "tools": [], "max_tokens": 5})).json()["tokens"] == tokens
    unfinished = (await gateway.post("/tokenize", {**CHAT, "add_generation_prompt": False})).json()["tokens"]
    assert tokens[: len(unfinished)] == unfinished and len(unfinished) < len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {**CHAT, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages"),
        ("/tokenize", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
        ("/tokenize", {**CHAT, "chat_template": "{{ messages }}"}, 400, "chat_template"),
        ("/tokenize", {**CHAT, "continue_final_message": True}, 400, "continue_final_message"),
        ("/tokenize", {**CHAT, "documents": [{"text": "x"}]}, 400, "documents"),
        ("/tokenize", {**CHAT, "reasoning_effort": "low"}, 400, "reasoning_effort"),
        ("/tokenize", {**CHAT, "reasoning": {"effort": "low"}}, 400, "reasoning"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "12"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, True]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * (MAX_MODEL_LEN + 1)}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
)
async def test_a_bad_request_names_its_field(
    gateway: Gateway, path: str, body: dict[str, object], status: int, param: str
) -> None:
    response = await gateway.post(path, body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200
