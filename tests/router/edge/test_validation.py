"""The one path to a RoutedRequest: a request that passes is complete, and a refusal names its field."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.core.errors import InvalidRequestError, UnavailableError, UnknownModelError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.generation.token_ids import check_token_ids
from kvrelay.text.tokenizer import Tokenizer
from router.edge import validation
from router.edge.validation import (
    MAX_CACHE_SALT_CHARS,
    MAX_CHAT_TEMPLATE_KWARGS_CHARS,
    ChatPrompt,
    ClientRequest,
    RequestValidator,
    TextPrompt,
    TokenPrompt,
)
from router.request import RoutedRequest
from tests.router.edge.edge_parts import MAX_MODEL_LEN, MAX_NUM_SEQS, MODEL, ScriptedRelay
from tests.text.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[3]
TEXT = TextPrompt("hello world")
CHAT = ChatPrompt([{"role": "user", "content": "hello"}])


async def routed(relay: ScriptedRelay, client: ClientRequest) -> RoutedRequest:
    validator, model = RequestValidator(relay.tokenizer, MODEL, default_timeout=60.0), relay.served_model()
    return await validator.routed(client, "id-1", validator.sampling(client, model), model)


async def refused(relay: ScriptedRelay, client: ClientRequest) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await routed(relay, client)
    return caught.value


async def test_text_gets_the_model_s_special_tokens_and_chat_its_template(relay: ScriptedRelay) -> None:
    plain = await relay.tokenizer.encode("hello world", add_special_tokens=False)
    assert (await routed(relay, ClientRequest(TEXT, SamplingParams()))).prompt_token_ids == (0, *plain)
    bare = ClientRequest(TextPrompt("hello world", add_special_tokens=False), SamplingParams())
    assert (await routed(relay, bare)).prompt_token_ids == tuple(plain)
    chat = (await routed(relay, ClientRequest(CHAT, SamplingParams()))).prompt_token_ids
    assert relay.tokenizer.decode(chat, skip_special_tokens=False) == "<user>hello\n<assistant>"


async def test_an_empty_text_is_the_token_that_the_tokenizer_puts_before_a_text(relay: ScriptedRelay) -> None:
    assert (await routed(relay, ClientRequest(TextPrompt(""), SamplingParams()))).prompt_token_ids == (0,)


async def test_what_the_client_leaves_out_has_its_default(relay: ScriptedRelay) -> None:
    completion = await routed(relay, ClientRequest(TEXT, SamplingParams()))
    chat = await routed(relay, ClientRequest(CHAT, SamplingParams()))
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == MAX_MODEL_LEN - len(chat.prompt_token_ids)
    assert completion.sampling.seed is not None
    assert completion.sampling.seed != chat.sampling.seed
    assert completion.timeout == 60.0
    almost_full = await routed(relay, ClientRequest(TokenPrompt([2] * (MAX_MODEL_LEN - 3)), SamplingParams()))
    assert almost_full.sampling.max_tokens == 3


async def test_what_the_client_gave_is_kept(relay: ScriptedRelay) -> None:
    client = ClientRequest(
        TEXT,
        SamplingParams(seed=7, top_k=10**12),
        max_tokens=5,
        model=MODEL,
        priority=-3,
        cache_salt="tenant",
    )
    request = await routed(relay, client)
    assert (request.sampling.seed, request.sampling.max_tokens) == (7, 5)
    assert request.sampling.top_k == relay.tokenizer.vocab_size
    assert (request.priority, request.cache_salt) == (-3, b"tenant")
    longest = ClientRequest(
        TEXT,
        SamplingParams(min_tokens=5),
        max_tokens=5,
        priority=2**31 - 1,
        cache_salt="s" * MAX_CACHE_SALT_CHARS,
    )
    request = await routed(relay, longest)
    assert (request.sampling.min_tokens, request.priority) == (5, 2**31 - 1)
    request = await routed(relay, ClientRequest(TEXT, SamplingParams(), priority=-(2**31)))
    assert request.priority == -(2**31)


@pytest.mark.parametrize(
    ("client", "field", "words"),
    [
        (ClientRequest(TextPrompt("", add_special_tokens=False), SamplingParams()), "prompt", ["empty"]),
        (ClientRequest(TextPrompt("", False), SamplingParams()), "prompt", ["empty"]),
        (ClientRequest(TokenPrompt([]), SamplingParams()), "prompt", ["no tokens"]),
        (ClientRequest(ChatPrompt([]), SamplingParams()), "messages", ["empty"]),
        (ClientRequest(TokenPrompt([5, 400_000]), SamplingParams()), "prompt", ["400000", "vocabulary"]),
        (ClientRequest(TokenPrompt([-1]), SamplingParams()), "prompt", ["-1"]),
        (ClientRequest(TokenPrompt([2] * MAX_MODEL_LEN), SamplingParams()), "prompt", [str(MAX_MODEL_LEN)]),
        (ClientRequest(TokenPrompt([2] * 250), SamplingParams(), max_tokens=7), "max_tokens", ["250", "7", "256", "6"]),
        (ClientRequest(TextPrompt("x" * 1_000_000), SamplingParams()), "prompt", ["1000000", "256"]),
        (ClientRequest(TEXT, SamplingParams(), max_tokens=-1), "max_tokens", ["-1"]),
        (ClientRequest(TEXT, SamplingParams(), max_tokens=0), "max_tokens", ["0"]),
        (ClientRequest(TEXT, SamplingParams(n=MAX_NUM_SEQS + 1)), "n", ["65", "64", "max_num_seqs"]),
        (ClientRequest(TEXT, SamplingParams(min_tokens=20)), "min_tokens", ["20", "16"]),
        (ClientRequest(TEXT, SamplingParams(min_tokens=2**40)), "min_tokens", ["(16)"]),
        (ClientRequest(TEXT, SamplingParams(temperature=float("nan"))), "temperature", ["nan"]),
        (ClientRequest(TEXT, SamplingParams(top_p=0.0)), "top_p", ["0.0"]),
        (ClientRequest(TEXT, SamplingParams(stop_token_ids=(10**9,))), "stop_token_ids", ["vocabulary"]),
        (ClientRequest(TEXT, SamplingParams(logit_bias=((10**9, 1.0),))), "logit_bias", ["vocabulary"]),
        (ClientRequest(TEXT, SamplingParams(stop=("",))), "stop", ["1 to"]),
        (ClientRequest(TEXT, SamplingParams(), priority=2**31), "priority", ["32 bits"]),
        (ClientRequest(TEXT, SamplingParams(), priority=-(2**31) - 1), "priority", ["32 bits"]),
        (ClientRequest(TEXT, SamplingParams(), cache_salt=""), "cache_salt", ["1 to"]),
        (ClientRequest(TEXT, SamplingParams(), cache_salt="s" * (MAX_CACHE_SALT_CHARS + 1)), "cache_salt", ["1 to"]),
        (ClientRequest(TEXT, SamplingParams(), model="gpt-5"), "model", ["gpt-5", MODEL]),
    ],
)
async def test_a_refusal_names_its_field(
    relay: ScriptedRelay, client: ClientRequest, field: str, words: list[str]
) -> None:
    error = await refused(relay, client)
    assert error.field == field
    for word in words:
        assert word in str(error)
    assert not relay.requests


async def test_the_first_token_id_behind_the_vocabulary_is_refused(relay: ScriptedRelay) -> None:
    for token_id, is_known in ((relay.tokenizer.vocab_size - 1, True), (relay.tokenizer.vocab_size, False)):
        client = ClientRequest(TokenPrompt([5, token_id]), SamplingParams())
        if is_known:
            assert (await routed(relay, client)).prompt_token_ids == (5, token_id)
        else:
            assert str(token_id) in str(await refused(relay, client))


async def test_tokens_of_a_text_are_checked_only_if_the_model_lacks_one(
    relay: ScriptedRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be millions."""
    checked: list[str | None] = []

    def check(token_ids: Sequence[int], vocab_size: int, *, field: str, name: str | None = None) -> None:
        checked.append(field)
        check_token_ids(token_ids, vocab_size, field=field, name=name)

    monkeypatch.setattr(validation, "check_token_ids", check)
    for prompt in (TEXT, CHAT, TokenPrompt([5])):
        await routed(relay, ClientRequest(prompt, SamplingParams()))
    assert checked == ["prompt"]
    model = replace(relay.served_model(), vocab_size=relay.tokenizer.vocab_size - 1)
    monkeypatch.setattr(relay, "served_model", lambda: model)
    await routed(relay, ClientRequest(TEXT, SamplingParams()))
    assert checked == ["prompt"] * 2


@pytest.mark.parametrize(("num_more", "is_allowed"), [(0, True), (1, False)])
async def test_the_variables_of_a_template_have_a_largest_size(
    relay: ScriptedRelay, num_more: int, is_allowed: bool
) -> None:
    empty = {"unused": "", "others": [1, {"x": None}]}
    full = {**empty, "unused": "x" * (MAX_CHAT_TEMPLATE_KWARGS_CHARS - len(json.dumps(empty)) + num_more)}
    client = ClientRequest(replace(CHAT, template_kwargs=full), SamplingParams())
    if is_allowed:
        assert await routed(relay, client)
    else:
        assert "more than 16384 characters" in str(await refused(relay, client))


async def test_of_too_many_variables_not_all_are_looked_at(relay: ScriptedRelay) -> None:
    class TooMany(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(MAX_CHAT_TEMPLATE_KWARGS_CHARS)
            raise AssertionError("all were looked at")

    client = ClientRequest(replace(CHAT, template_kwargs={"unused": TooMany([1])}), SamplingParams())
    assert (await refused(relay, client)).field == "chat_template_kwargs"


async def test_an_unknown_model_has_its_own_type(relay: ScriptedRelay) -> None:
    assert isinstance(await refused(relay, ClientRequest(TEXT, SamplingParams(), model="other")), UnknownModelError)


async def test_a_template_that_refuses_is_the_client_s_error(relay: ScriptedRelay) -> None:
    prompt = ChatPrompt([{"role": "assistant", "content": "I begin"}])
    error = await refused(relay, ClientRequest(prompt, SamplingParams()))
    assert error.field == "messages"
    assert "conversations begin with a user" in str(error)


async def test_without_a_node_that_can_serve_a_request_is_unavailable(relay: ScriptedRelay) -> None:
    relay.available = False
    with pytest.raises(UnavailableError):
        await routed(relay, ClientRequest(TEXT, SamplingParams()))


async def test_a_tokenizer_without_a_template_serves_completions_only(tmp_path: Path) -> None:
    relay = ScriptedRelay(Tokenizer.load(str(write_tokenizer(tmp_path, chat_template=None))))
    assert (await routed(relay, ClientRequest(TEXT, SamplingParams()))).prompt_token_ids
    assert "no chat template" in str(await refused(relay, ClientRequest(CHAT, SamplingParams())))


def test_the_edge_needs_no_torch_and_says_nothing_about_it(tokenizer_directory: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import router.edge.gateway, router.edge.grpc_service\n"
        "from kvrelay.text.tokenizer import Tokenizer\n"
        "print(Tokenizer.load(sys.argv[1]).render_chat_now([{'role': 'user', 'content': 'hello'}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tokenizer_directory)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("<user>hello\n<assistant>\n", "", 0)
