"""Incremental text equals the whole text, however tokens split characters and stop strings."""

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvrelay.text.detokenizer import Detokenizer
from kvrelay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizer import backend_tokenizer, sentencepiece_like

SPECIAL = 5 + 256  # of `sentencepiece_like`
TEXTS = [
    "hello world",
    "",
    " leading and trailing ",
    "\U0001f389\U0001f44d\U0001f3fd emoji with a modifier, and a family \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "你好,世界。日本語テキスト 한국어",
    "e\u0301 combined, \u00e9 composed, a\u0300\u0301\u0302",
    "replacement \ufffd inside, and at the end \ufffd",
    "\n\ttabs\n\n",
]


def run(
    tokenizer: Tokenizer,
    token_ids: list[int],
    *,
    prompt: Sequence[int] = (),
    stop: tuple[str, ...] = (),
    include_stop: bool = False,
) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=prompt, stop=stop, include_stop=include_stop)
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped_by is not None:
            return pieces, detokenizer.stopped_by
    pieces.append(detokenizer.flush())
    return pieces, detokenizer.stopped_by


def expected(text: str, stop: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """Returns the text by definition: cut at the stop string that is complete first, at the longest if there are
    several."""
    ends = [(text.find(string) + len(string), -len(string), string) for string in stop if string in text]
    if not ends:
        return text, None
    end, _, found = min(ends)
    return text[: end if include_stop else end - len(found)], found


def one_token_per_byte(tokenizer: Tokenizer, text: str) -> list[int]:
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [of_byte[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("text", TEXTS)
async def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    for token_ids in (await tokenizer.encode(text, add_special_tokens=True), one_token_per_byte(tokenizer, text)):
        pieces, stopped_by = run(tokenizer, token_ids)
        assert "".join(pieces) == text
        assert stopped_by is None


async def test_a_split_character_comes_when_it_is_complete(tokenizer: Tokenizer) -> None:
    pieces, _ = run(tokenizer, one_token_per_byte(tokenizer, "a\U0001f389b"))
    assert pieces == ["a", "", "", "", "\U0001f389", "b", ""]


async def test_an_incomplete_character_at_the_end_is_flushed(tokenizer: Tokenizer) -> None:
    token_ids = one_token_per_byte(tokenizer, "ok 你")[:-1]
    pieces, _ = run(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True) == "ok \ufffd"


async def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    token_ids = [0, *await tokenizer.encode("hello", add_special_tokens=False), 1]
    for skip, text in ((True, "hello"), (False, "<s>hello</s>")):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        assert "".join(map(detokenizer.push, token_ids)) + detokenizer.flush() == text


async def test_added_tokens_that_are_not_special_are_text() -> None:
    """With characters, too, that stand for no byte."""
    backend, added = backend_tokenizer(), ["<think>", "<\uff5ctool\uff5c>"]
    backend.add_tokens(added)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]
    token_ids = [0, *await tokenizer.encode("hello".join(added), add_special_tokens=False), 1]
    pieces, _ = run(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True) == "hello".join(added)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_so_where_others_are_decoded_together(skip: bool) -> None:
    tokenizer = sentencepiece_like()
    token_ids = [SPECIAL, 1, *[SPECIAL] * 70, *(5 + byte for byte in "你".encode()), SPECIAL, 2]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [*map(detokenizer.push, token_ids), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_bytes_that_are_no_character_come_before_the_next_text() -> None:
    """The library would decode them all again with each one that follows: thousands of them would take seconds."""
    tokenizer = sentencepiece_like()
    for more in ([], [3, 1], [SPECIAL] * 9 + [1]):
        token_ids = [1, *[5 + 0xE4] * 200, *more]
        pieces, _ = run(tokenizer, token_ids)
        assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)
        assert len("".join(pieces[:200])) >= 100


async def test_what_is_certainly_no_character_comes_at_once(tokenizer: Tokenizer) -> None:
    of_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    pieces, _ = run(tokenizer, [of_byte[byte] for byte in (b"\xe4", b"\xe4", b"\xbd", b"a")])
    assert pieces == ["", "\ufffd", "", "\ufffda", ""]


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("one STOP two", ("STOP",)),
        ("spanning tokens: the lazy dog sleeps", ("lazy dog",)),
        ("aaaaaaab", ("aaab",)),
        ("abcabcabd", ("abcabd",)),
        ("xabcdefy", ("abcdefg", "bcd")),
        ("xabcdy", ("bcd", "abcd")),
        ("nothing to find", ("absent", "nothing at all")),
        ("ends with the beginning of ST", ("STOP",)),
        ("你好。世界", ("。",)),
        ("\U0001f389 party \U0001f44d", ("\U0001f44d",)),
        ("a\n\nb", ("\n\n",)),
        ("STOP at once", ("STOP",)),
    ],
)
async def test_text_is_cut_at_the_stop_string_that_is_complete_first(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], include_stop: bool
) -> None:
    for token_ids in (await tokenizer.encode(text, add_special_tokens=False), one_token_per_byte(tokenizer, text)):
        pieces, stopped_by = run(tokenizer, token_ids, stop=stop, include_stop=include_stop)
        assert ("".join(pieces), stopped_by) == expected(text, stop, include_stop)


async def test_only_what_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    pieces, _ = run(tokenizer, one_token_per_byte(tokenizer, "abSTxSTOPz"), stop=("STOP",))
    assert pieces == ["a", "b", "", "", "STx", "", "", "", ""]


async def test_without_check_stop_a_stop_string_is_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=("ab",))
    first, *rest = one_token_per_byte(tokenizer, "abab")
    text = detokenizer.push(first, check_stop=False) + detokenizer.push(rest[0], check_stop=False)
    assert text == "ab"
    assert [detokenizer.push(token_id) for token_id in rest[1:]] == ["", ""]
    assert detokenizer.stopped_by == "ab"


def test_a_place_where_no_stop_string_begins_is_not_looked_at_again(tokenizer: Tokenizer) -> None:
    """Otherwise each token of a long run would cost as much as the whole run."""

    class Stop(str):
        num_looks = 0

        def startswith(self, *args: Any) -> bool:
            Stop.num_looks += 1
            return super().startswith(*args)

    text = "a" * 900
    stop = ("a" * 1000, Stop("a" * 100 + "b" * 900))  # the first one holds everything back
    pieces, _ = run(tokenizer, one_token_per_byte(tokenizer, text), stop=stop)
    assert pieces == [""] * 900 + [text]
    assert Stop.num_looks <= 2 * len(text)


@pytest.mark.parametrize("seed", range(40))
def test_random_tokens_with_random_stop_strings_are_cut_as_defined(tokenizer: Tokenizer, seed: int) -> None:
    """Random ids give invalid UTF-8 most of the time. Random substrings of the text are stop strings that occur in
    it."""
    rng = random.Random(seed)
    for _ in range(10):
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 60))]
        whole = tokenizer.decode(token_ids, skip_special_tokens=True)
        stop = tuple(
            whole[start : start + rng.randrange(1, 8)] or "x"
            for start in (rng.randrange(len(whole) + 1) for _ in range(rng.randrange(4)))
        )
        include_stop = rng.random() < 0.5
        pieces, stopped_by = run(tokenizer, token_ids, stop=stop, include_stop=include_stop)
        assert ("".join(pieces), stopped_by) == expected(whole, stop, include_stop)


def test_sentencepiece_spaces_and_byte_tokens_decode_to_the_text() -> None:
    tokenizer = sentencepiece_like()
    token_ids = [1, 2, *(5 + byte for byte in "你\U0001f389".encode()), 3, 1]
    pieces, _ = run(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True) == "hello world你\U0001f389lo hello"


@pytest.mark.parametrize("seed", range(20))
def test_byte_tokens_that_form_no_character_never_fail(seed: int) -> None:
    """Later bytes may make earlier ones invalid after their text was returned; the whole text still has the right
    length."""
    rng = random.Random(seed)
    tokenizer = sentencepiece_like()
    token_ids = [rng.choice([1, 2, 3, 5 + 0x41, 5 + 0xE4, 5 + 0xBD, 5 + 0xA0]) for _ in range(50)]
    pieces, _ = run(tokenizer, token_ids)
    assert len("".join(pieces)) >= len(tokenizer.decode(token_ids, skip_special_tokens=True))


@pytest.mark.parametrize("word", [1, 4])  # 4 is a space, which is no text at the beginning of one
def test_what_is_decoded_again_does_not_grow_with_the_output(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can choose the tokens of long outputs would otherwise keep the event loop from everybody else."""
    tokenizer = sentencepiece_like()
    decode = tokenizer.decode
    lengths: list[int] = []

    def noting(token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", noting)
    run(tokenizer, [1, *[5 + 0x41, 5 + 0xF0, word] * 200])
    assert len(lengths) > 200, "other tokens than these cost most"
    assert max(lengths) < 100


@pytest.mark.parametrize("broken", [b"\xe4" * 64, b"\xff", b"\xe4\xbd\xff", b"\xa0\xe4\xbd"])
@pytest.mark.parametrize("more", ["", "你好" * 5, "你" * 21, "你" * 22, "abc" * 40, "a你\u00e9\U0001f389" * 40])
def test_characters_behind_bytes_that_are_none_are_none_and_nothing_is_repeated(broken: bytes, more: str) -> None:
    """The library reads the bytes of a run together, of which a stream has the last ones only."""
    tokenizer = sentencepiece_like()
    token_ids = [1, *(5 + byte for byte in broken + more.encode()), 3, 1, *(5 + byte for byte in "你".encode()), 2]
    pieces, _ = run(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(10))
def test_a_long_output_with_bytes_that_form_no_character_is_that_of_its_parts(seed: int) -> None:
    """A part begins with a word, and goes on from the word before it as from a prompt."""
    rng = random.Random(seed)
    tokenizer = sentencepiece_like()
    characters = [[5 + byte for byte in data] for data in ("\U0001f389".encode(), b"A", b"\xff")]
    words = ([1, 3], [3, 1])
    parts = [[*rng.choice(words), SPECIAL, *chain(*rng.choices(characters, (2, 2, 1), k=4))] for _ in range(500)]
    pieces, _ = run(tokenizer, [*chain(*parts)])
    expected = ["".join(run(tokenizer, part, prompt=[1] * (number > 0))[0]) for number, part in enumerate(parts)]
    assert "".join(pieces) == "".join(expected)


@pytest.mark.parametrize("count", [21, 22, 43, 100])
def test_replacement_characters_in_the_output_cost_no_text_behind_them(count: int) -> None:
    tokenizer = sentencepiece_like()
    token_ids = [1, *(5 + byte for byte in ("\ufffd" * count).encode()), 3, 1]
    pieces, _ = run(tokenizer, token_ids)
    assert "".join(pieces) == "hello" + "\ufffd" * count + "lo hello"


@pytest.mark.parametrize("count", [1, 64, 100])
@pytest.mark.parametrize("num_words", [1, 64, 65])
def test_replacement_characters_that_are_tokens_are_text_like_any_other(num_words: int, count: int) -> None:
    tokenizer = sentencepiece_like(byte_fallback=False)
    token_ids = [*[1] * num_words, *[5] * count, 3, 1]
    pieces, _ = run(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ([], "world"),
        ([SPECIAL], "world"),  # of which nothing is text
        ([1], " world"),
        ([SPECIAL, 1, 2, 3], " world"),
        ([1, SPECIAL, SPECIAL], " world"),  # as at the end of a chat's prompt
        ([1, *(5 + byte for byte in "你".encode())], " world"),
        ([1, *(5 + byte for byte in "你".encode()[:2])], " world"),
        ([5 + ord("\n")], " world"),
        ([4], " world"),  # the space that is dropped is the prompt's
        ([4, *(5 + byte for byte in "\U0001f389".encode())], " world"),  # no token of it is text by itself
        ([5 + byte for byte in ("你" * 20).encode()], " world"),
    ],
)
def test_the_space_before_the_first_word_is_dropped_only_at_the_beginning_of_a_text(
    prompt: list[int], begins: str
) -> None:
    tokenizer = sentencepiece_like()
    for rest in ([], [1, 3], [5 + 0xE4], [1] * 20):
        pieces, _ = run(tokenizer, [2, *rest], prompt=prompt)
        assert "".join(pieces) == begins + tokenizer.decode([2, *rest], skip_special_tokens=True).removeprefix("world")
    _, stopped_by = run(tokenizer, [2, 1], prompt=prompt, stop=(" world",))
    assert (stopped_by is not None) is begins.startswith(" ")


def test_bytes_that_complete_no_character_of_the_output_do_not_change_behind_a_prompt() -> None:
    tokenizer = sentencepiece_like()
    for prompt in ([1], [5 + ord("\n")], [1, 5 + 0xE4, 5 + 0xBD]):
        pieces, _ = run(tokenizer, [5 + 0xA0, 3, 1], prompt=prompt)
        assert "".join(pieces) == "\ufffdlo hello"


@pytest.mark.parametrize("seed", range(20))
def test_byte_level_text_does_not_depend_on_the_prompt(tokenizer: Tokenizer, seed: int) -> None:
    """Not even if the prompt ends inside of a character: its bytes are not the output's."""
    rng = random.Random(seed)
    for _ in range(20):
        prompt, token_ids = ([rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(20))] for _ in range(2))
        pieces, _ = run(tokenizer, token_ids, prompt=prompt)
        assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)
    *prompt, last, end = one_token_per_byte(tokenizer, "a你b")
    pieces, _ = run(tokenizer, [last, end], prompt=prompt)
    assert "".join(pieces) == "\ufffdb"
