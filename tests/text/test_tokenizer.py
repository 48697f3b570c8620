"""The tokenizer of a model directory: long texts, the bytes of tokens, and directories without one."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvrelay.core.errors import InvalidRequestError, ModelLoadError
from kvrelay.text import tokenizer as tokenizer_module
from kvrelay.text.tokenizer import LONG_CHAT_MESSAGES, LONG_TEXT_CHARS, LONG_TEXT_TOKENS, Tokenizer
from tests.text.tiny_tokenizer import backend_tokenizer, sentencepiece_like, write_tokenizer


async def test_long_text_is_encoded_like_short_text(tokenizer: Tokenizer) -> None:
    text = "hello world " * LONG_TEXT_CHARS
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    for add in (False, True):
        now = tokenizer.encode_now(text, add_special_tokens=add)
        assert await tokenizer.encode(text, add_special_tokens=add) == now


async def test_the_event_loop_turns_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    encoding = asyncio.create_task(tokenizer.encode("hello world " * (8 * LONG_TEXT_CHARS), add_special_tokens=False))
    turns = [time.perf_counter()]
    while not encoding.done():
        await asyncio.sleep(0)
        turns.append(time.perf_counter())
    longest_wait = max(later - earlier for earlier, later in pairwise(turns))
    assert longest_wait < (turns[-1] - turns[0]) / 2, "it has waited for most of the time"


async def test_huge_texts_are_encoded_one_at_a_time_and_a_long_one_does_not_wait_for_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads together would take gigabytes for them."""
    monkeypatch.setattr(tokenizer_module, "HUGE_TEXT_CHARS", 2 * LONG_TEXT_CHARS)
    encode, begun, may_end = tokenizer._encode_unlocked, [], threading.Event()

    def held_up(text: str, *, add_special_tokens: bool) -> list[int]:
        begun.append(len(text))
        assert len(text) <= 2 * LONG_TEXT_CHARS or may_end.wait(60)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode_unlocked", held_up)
    huge, long = "x" * (2 * LONG_TEXT_CHARS + 1), "x" * 2 * LONG_TEXT_CHARS
    encoding = [asyncio.create_task(tokenizer.encode(huge, add_special_tokens=False)) for _ in range(3)]
    try:
        await asyncio.sleep(0)
        assert await tokenizer.encode(long, add_special_tokens=False)
        while len(huge) not in begun:
            await asyncio.sleep(0)
        assert sorted(begun) == [len(long), len(huge)]
    finally:
        may_end.set()
    assert len(await asyncio.gather(*encoding)) == 3


async def test_many_tokens_are_decoded_beside_the_event_loop_like_few(tokenizer: Tokenizer) -> None:
    token_ids = [0, *(5 + number % 300 for number in range(LONG_TEXT_TOKENS))]
    for skip in (True, False):
        decoding = [asyncio.create_task(tokenizer.decode_long(token_ids, skip_special_tokens=skip)) for _ in range(4)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in decoding), "the loop has waited"
        assert set(await asyncio.gather(*decoding)) == {tokenizer.decode(token_ids, skip_special_tokens=skip)}


def test_the_largest_token_may_be_one_that_only_begins_texts(tokenizer: Tokenizer) -> None:
    assert tokenizer.largest_token_id == tokenizer.vocab_size - 1
    backend = backend_tokenizer()
    backend.post_processor = processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", 9999)])
    made = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]
    assert max(made.encode_now("hello", add_special_tokens=True)) == made.largest_token_id == 9999


async def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "hello 你好 \U0001f389"
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == text
    assert tokenizer.token_text(1) == "</s>"
    assert tokenizer.token_bytes(10**6) == b""


def test_bytes_of_a_sentencepiece_tokenizer_join_to_the_text_with_its_first_space() -> None:
    tokenizer = sentencepiece_like()
    token_ids = [1, 2, *(5 + byte for byte in "你J".encode()), 3, 4, 5 + 256]
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == " hello world你Jlo </s>"


def test_bytes_of_an_added_token_are_those_of_its_text() -> None:
    """Code Llama has such tokens."""
    backend = sentencepiece_like().backend
    backend.add_special_tokens(["\u2581<PRE>"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]
    token_ids = [2, tokenizer.vocab_size - 1]
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == b" world <PRE>"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "world <PRE>"


def test_prompts_are_neither_cut_nor_filled_up_whatever_the_checkpoint_says(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    saved = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=4)
    saved.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer.load(str(directory))
    for text in ("hello world, this is a test", "a"):
        token_ids = tokenizer.encode_now(text, add_special_tokens=False)
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


async def test_a_long_chat_is_rendered_beside_the_event_loop_like_a_short_one(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": f"hello {number}"} for number in range(LONG_CHAT_MESSAGES + 1)]
    rendered = [asyncio.create_task(tokenizer.render_chat(messages)) for _ in range(4)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in rendered), "the loop has waited"
    assert set(await asyncio.gather(*rendered)) == {tokenizer.render_chat_now(messages)}


def test_a_developer_is_the_system_of_a_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": role, "content": "be brief"} for role in ("developer", "user")]
    assert tokenizer.render_chat_now(messages) == "<system>be brief\n<user>be brief\n<assistant>"
    assert messages[0]["role"] == "developer"


@pytest.mark.parametrize(
    "name", ["messages", "conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "self"]
)
def test_a_variable_of_a_template_has_no_other_meaning(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs may not have {name}$") as refused:
        tokenizer.render_chat_now([{"role": "user", "content": "hello"}], variables={name: None})
    assert refused.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ 1 // x }}", 0),
        ("{% for i in range(x) %}{% endfor %}", 10**9),
        ("{{ 'a' * x }}", 10**17),
        ("{{ x + 1 }}", "1"),
        ("{{ x.a.b }}", {}),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", None),
        ("{{ cycler(*x) }}", []),
    ],
)
def test_a_template_that_fails_has_refused_what_it_was_given(tmp_path: Path, template: str, value: object) -> None:
    tokenizer = Tokenizer.load(str(write_tokenizer(tmp_path, chat_template=template)))
    with pytest.raises(InvalidRequestError, match="refused the messages and chat_template_kwargs") as refused:
        tokenizer.render_chat_now([{"role": "user", "content": "hello"}], variables={"x": value})
    assert refused.value.field == "messages"


async def test_a_long_chat_has_its_variables_too(tokenizer: Tokenizer) -> None:
    for count in (1, LONG_CHAT_MESSAGES + 1):
        messages = [{"role": "user", "content": "hello"}] * count
        rendered = await tokenizer.render_chat(messages, variables={"style": "terse", "kwargs": 1})
        assert rendered == "<style>terse\n" + tokenizer.render_chat_now(messages)


def test_a_directory_without_a_tokenizer_is_a_model_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json, nor anything else that a tokenizer is made"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.model").write_text("not SentencePiece's")
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json, and none can be made from what it has"):
        Tokenizer.load(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model is a file: a model is a directory with config\.json"):
        Tokenizer.load(str(tmp_path / "tokenizer.model"))
    with pytest.raises(ModelLoadError, match="neither a directory nor a model in the local Hugging Face cache"):
        Tokenizer.load(str(tmp_path / "absent"))
    with pytest.raises(ModelLoadError, match="the model's name is empty"):
        Tokenizer.load("")


def _like_llama_2() -> tokenizers.Tokenizer:
    """Makes a tokenizer that writes spaces as U+2581, also before the first word, wherever that is."""
    pieces = ["<unk>", "\u2581", "[", "a", "\u2581[", "\u2581a"]
    merges = [("\u2581", "["), ("\u2581", "a")]
    made = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.add_special_tokens(["<s>"])
    return made


def _with_single_digits() -> tokenizers.Tokenizer:
    made = backend_tokenizer()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


@pytest.mark.parametrize(
    ("named", "make"),
    [
        ("LlamaTokenizer", _like_llama_2),
        ("GPT2Tokenizer", _with_single_digits),
        ("LlamaTokenizerFast", backend_tokenizer),
        ("Qwen2Tokenizer", backend_tokenizer),
        ("PreTrainedTokenizerFast", backend_tokenizer),
    ],
)
def test_a_text_is_split_as_tokenizer_json_says(
    named: str, make: Callable[[], tokenizers.Tokenizer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And not as the class does that the checkpoint names."""
    made = make()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named, "legacy": False}))
    tokenizer = Tokenizer.load(str(tmp_path))
    for text in ("<s>[a a", "a   12", "hello  world\n\n 3"):
        for add_special_tokens in (False, True):
            expected = made.encode(text, add_special_tokens=add_special_tokens).ids
            assert tokenizer.encode_now(text, add_special_tokens=add_special_tokens) == expected
    assert not caplog.records


def test_code_in_a_models_directory_is_not_run(tmp_path: Path) -> None:
    directory, trace = write_tokenizer(tmp_path), tmp_path / "trace"
    (directory / "custom.py").write_text(f"open({str(trace)!r}, 'w')")
    named = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": ["custom.Custom", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(ModelLoadError, match="custom code"):
        Tokenizer.load(str(directory))
    assert not trace.exists()
