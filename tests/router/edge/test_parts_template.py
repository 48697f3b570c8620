"""A model whose chat template expects parts gets the texts of a chat, whichever way that comes."""

from pathlib import Path

import pytest

from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2
from router.edge.grpc_service import RouterService
from tests.router.edge import gateway_client, grpc_client
from tests.router.edge.edge_parts import ScriptedRelay, make_edge
from tests.text.tiny_tokenizer import PARTS_TEMPLATE, write_tokenizer

RENDERED = "<system>be brief\n<user>hello\nworld\n<assistant>"


@pytest.fixture
def relay(tmp_path: Path) -> ScriptedRelay:
    return ScriptedRelay(Tokenizer.load(str(write_tokenizer(tmp_path, chat_template=PARTS_TEMPLATE))))


def rendered(relay: ScriptedRelay) -> str:
    [request] = relay.requests
    return relay.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("content", ["hello\nworld", [{"type": "text", "text": text} for text in ("hello", "world")]])
async def test_over_http(relay: ScriptedRelay, content: object) -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": content}]
    async with gateway_client.serving(relay) as gateway:
        assert (await gateway.post("/v1/chat/completions", {"messages": messages})).status_code == 200
    assert rendered(relay) == RENDERED


async def test_over_grpc(relay: ScriptedRelay) -> None:
    messages = [
        router_pb2.ChatMessage(role="system", content="be brief"),
        router_pb2.ChatMessage(role="user", content="hello\nworld"),
    ]
    async with grpc_client.serving(RouterService(make_edge(relay))) as stub:
        await stub.Generate(router_pb2.GenerateRequest(chat=router_pb2.ChatMessages(messages=messages)))
    assert rendered(relay) == RENDERED
