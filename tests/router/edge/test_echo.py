"""Completions that repeat their prompt with its log-probabilities, by which clients rate texts that they have."""

import random
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.turns import ITEMS_AT_A_TIME
from kvrelay.text.tokenizer import LONG_TEXT_TOKENS, Tokenizer
from router.edge.echo import echoes, encoded_logprobs
from router.edge.openai_format import Echo
from router.edge.validation import TokenPrompt
from tests.loop_turns import counting_turns
from tests.router.edge.edge_parts import ScriptedRelay, make_edge
from tests.router.edge.gateway_client import COMPLETION, REPLY, Gateway
from tests.text.tiny_tokenizer import sentencepiece_like

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for the whole file

ECHO = {**COMPLETION, "echo": True, "logprobs": 2}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


async def whole(gateway: Gateway, body: dict[str, object]) -> Any:
    response = await gateway.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(gateway: Gateway, body: dict[str, object]) -> dict[int, dict[str, Any]]:
    """Returns by index what the events of each choice add up to."""
    choices: dict[int, dict[str, Any]] = {}
    for event in (await gateway.events("/v1/completions", body))[:-1]:
        for choice in event["choices"]:
            found = choices.setdefault(choice["index"], {"text": "", "logprobs": {name: [] for name in LISTS}})
            found["text"] += choice["text"]
            found["finish_reason"] = choice["finish_reason"]
            for name in LISTS:
                found["logprobs"][name] += (choice["logprobs"] or {}).get(name, [])
    return choices


async def test_the_prompts_tokens_come_before_the_generated_ones(gateway: Gateway) -> None:
    answer = await whole(gateway, ECHO)
    [choice] = answer["choices"]
    found = choice["logprobs"]
    num_prompt_tokens = answer["usage"]["prompt_tokens"]
    assert {len(found[name]) for name in LISTS} == {answer["usage"]["total_tokens"]}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(logprob == -0.5 for logprob in found["token_logprobs"][1:])
    assert all(len(top) >= 2 for top in found["top_logprobs"][1:])
    assert found["tokens"][0] == "<s>" and choice["text"] == "The capital" + REPLY
    for token, offset in zip(found["tokens"][1:-1], found["text_offset"][1:-1], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert found["text_offset"][num_prompt_tokens] == len("The capital")
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("max_tokens", [0, 50])
async def test_a_stream_adds_up_to_the_whole_answer(gateway: Gateway, max_tokens: int) -> None:
    body = {**ECHO, "prompt": ["one", "two \u2028three"], "n": 2, "max_tokens": max_tokens}
    choices = (await whole(gateway, body))["choices"]
    assert await streamed(gateway, body) == {
        choice["index"]: {name: choice[name] for name in ("text", "logprobs", "finish_reason")} for choice in choices
    }


@pytest.mark.parametrize("prompt", ["The capital", [0, 20, 21, 1, 22], [7]])
@pytest.mark.parametrize("logprobs", [None, 0, 5])
async def test_with_max_tokens_of_0_there_is_only_the_prompt(
    gateway: Gateway, prompt: object, logprobs: int | None
) -> None:
    body = {**COMPLETION, "prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": 0}
    answer = await whole(gateway, body)
    [choice] = answer["choices"]
    tokenizer, token_ids = gateway.relay.tokenizer, gateway.relay.requests[0].prompt_token_ids
    skips = isinstance(prompt, str)
    assert choice["text"] == tokenizer.decode(token_ids, skip_special_tokens=skips)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(token_ids), 0)
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert {len(choice["logprobs"][name]) for name in LISTS} == {len(token_ids)}
        assert choice["logprobs"]["tokens"] == list(map(tokenizer.token_text, token_ids))
    *_, usage, _ = await gateway.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert usage["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_stay_apart_without_logprobs(gateway: Gateway) -> None:
    body = {**COMPLETION, "prompt": ["one", "two"], "echo": True, "prompt_logprobs": 1, "max_tokens": 0}
    first, second = (await whole(gateway, body))["choices"]
    for choice, prompt in ((first, "one"), (second, "two")):
        assert (choice["text"], choice["logprobs"]) == (prompt, None)
        assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) > 1


async def test_special_tokens_have_the_text_that_the_prompt_has_of_them(gateway: Gateway) -> None:
    """The tokenizer adds the first one to a text; the others are written in it."""
    [choice] = (await whole(gateway, {**ECHO, "prompt": "</s><s>the"}))["choices"]
    assert choice["logprobs"]["tokens"][:3] == ["<s>", "</s>", "<s>"]
    assert choice["logprobs"]["text_offset"][:4] == [0, 0, 4, 7]
    [choice] = (await whole(gateway, {**ECHO, "prompt": [0, 1, 20]}))["choices"]
    assert choice["logprobs"]["text_offset"][:4] == [0, 3, 7, 8] and choice["text"].startswith("<s></s>")


@pytest.mark.parametrize(
    ("text", "token_ids", "offsets"),
    [
        ("hello world", (1, 2), "0,5"),
        (" hello", (4, 1, 2), "0,0,6"),
        ("</s> hello", (261, 1, 2), "0,4,10"),
        ("hello</s>", (1, 261), "0,5"),
        ("hello world", (261, 1, 2), "0,0,5"),
    ],
)
async def test_a_space_that_a_decoder_drops_is_not_counted(text: str, token_ids: tuple[int, ...], offsets: str) -> None:
    """The pieces are 1: " hello", 2: " world", 4: " ", 261: `</s>`, which the tokenizer has added to a text that lacks
    it."""
    found = PromptLogprobs.of([TokenLogprobs(token_id, -0.5, 1) for token_id in token_ids[1:]])
    encoded = await encoded_logprobs(sentencepiece_like(), Echo(text), token_ids, found)
    assert encoded["text_offset"].decode() == offsets


async def test_offsets_are_right_behind_incomplete_characters(tokenizer: Tokenizer) -> None:
    """Those become U+FFFD once it is certain that nothing completes them; a special token has text behind them."""
    ids = range(len(tokenizer.backend.get_vocab()))
    incomplete = [token_id for token_id in ids if "\ufffd" in tokenizer.token_text(token_id)]
    rng = random.Random(1)
    for _ in range(100):
        kinds = ([rng.choice(incomplete)], [rng.choice(sorted(tokenizer.special_token_ids))], rng.choices(ids, k=2))
        token_ids = [token_id for kind in rng.choices(kinds, k=8) for token_id in kind]
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        found = PromptLogprobs.of([TokenLogprobs(token_id, -0.5, 1) for token_id in token_ids[1:]])
        encoded = await encoded_logprobs(tokenizer, Echo(text), token_ids, found)
        offsets = list(map(int, encoded["text_offset"].split(b",")))
        assert offsets == sorted(offsets)
        for token_id, offset in zip(token_ids, offsets, strict=True):
            piece = tokenizer.token_text(token_id)
            assert "\ufffd" in piece or text.startswith(piece, offset), (token_ids, token_id, offset)


async def test_a_token_that_only_the_model_knows_has_no_text(tokenizer: Tokenizer) -> None:
    known = await tokenizer.encode("the fox", add_special_tokens=False)
    assert list(map(tokenizer.token_text, known)) == ["the", " fox"]
    found = PromptLogprobs.of([TokenLogprobs(token_id, -0.5, 1) for token_id in known])
    encoded = await encoded_logprobs(tokenizer, Echo("the fox"), [tokenizer.vocab_size, *known], found)
    assert encoded["text_offset"] == b"0,0,3"


async def test_no_token_begins_behind_the_prompts_end() -> None:
    """The texts of WordPiece's tokens are longer than the prompt's: the generated ones follow that."""
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "##b": 1, "##c": 2}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]
    found = PromptLogprobs.of([TokenLogprobs(token_id, -0.5, 1) for token_id in (1, 2)])
    encoded = await encoded_logprobs(tokenizer, Echo("abc"), (0, 1, 2), found)
    assert encoded["text_offset"] == b"0,1,3"


async def test_the_loop_turns_while_a_long_prompt_is_encoded(tokenizer: Tokenizer) -> None:
    num_tokens = 20 * ITEMS_AT_A_TIME
    found = PromptLogprobs.of([TokenLogprobs(5, -1.0, 1)] * (num_tokens - 1))
    async with counting_turns() as num_turns:
        await encoded_logprobs(tokenizer, Echo(tokenizer.token_text(5) * num_tokens), [5] * num_tokens, found)
        assert num_turns() >= 39 + len(LISTS)


async def test_the_loop_turns_between_prompts_whose_texts_are_repeated(tokenizer: Tokenizer) -> None:
    prompts = [TokenPrompt([5])] * 30
    async with counting_turns() as num_turns:
        assert await echoes(tokenizer, prompts) == [Echo(tokenizer.token_text(5))] * 30
        assert num_turns() >= 30


async def test_the_text_of_many_tokens_is_made_beside_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = [5] * (LONG_TEXT_TOKENS + 1)
    expected = tokenizer.decode(token_ids, skip_special_tokens=False)
    edge = make_edge(ScriptedRelay(tokenizer, max_model_len=len(token_ids)))
    monkeypatch.setattr(tokenizer, "decode", None)
    assert await echoes(tokenizer, [TokenPrompt(token_ids)]) == [Echo(expected)]
    assert await edge.detokenize(token_ids, None, skip_special_tokens=False, field="tokens") == expected


@pytest.mark.parametrize("prompt", ["xxxxx", [5] * 5])
async def test_one_answer_repeats_a_bounded_number_of_characters(
    gateway: Gateway, prompt: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.edge.echo.MAX_CHARS", 5 * 12)
    body = {**COMPLETION, "echo": True, "max_tokens": 0}
    for num_prompts, n in ((12, 1), (1, 12), (3, 4)):
        await whole(gateway, body | {"prompt": [prompt] * num_prompts, "n": n})
    for num_prompts, n in ((13, 1), (1, 13), (4, 4)):
        response = await gateway.post("/v1/completions", body | {"prompt": [prompt] * num_prompts, "n": n})
        assert response.status_code == 400 and response.json()["error"]["param"] == "echo"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": [[5] * 250] * 4, "n": 64, "logprobs": 20, "max_tokens": 0}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": 0, "echo": None}, "max_tokens"),
    ],
)
async def test_what_cannot_be_repeated_is_refused_by_name(
    gateway: Gateway, change: dict[str, object], param: str
) -> None:
    response = await gateway.post("/v1/completions", ECHO | change)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("min_tokens", "message"),
    [(1, "min_tokens (1) must not exceed max_tokens (0)"), (-1, "min_tokens must be at least 0, got -1")],
)
async def test_a_refusal_has_the_numbers_that_the_client_gave(gateway: Gateway, min_tokens: int, message: str) -> None:
    """Even where one token is computed for a `max_tokens` of 0."""
    body = ECHO | {"max_tokens": 0}
    await whole(gateway, body | {"min_tokens": 0})
    error = (await gateway.post("/v1/completions", body | {"min_tokens": min_tokens})).json()["error"]
    assert (error["param"], error["message"]) == ("min_tokens", message)
