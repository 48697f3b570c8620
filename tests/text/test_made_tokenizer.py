"""Directories without tokenizer.json: from which of their files a tokenizer is made, and which are refused."""

import json
from pathlib import Path

import pytest

from kvrelay.core.errors import ModelLoadError
from kvrelay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizer import backend_tokenizer


def write_files(directory: Path, tokenizer_class: str, *, vocab: str = "vocab.json") -> Path:
    """Writes what older checkpoints have of `backend_tokenizer`, and returns the directory."""
    backend_tokenizer().model.save(str(directory))
    (directory / "vocab.json").rename(directory / vocab)
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    special = {f"{name}_token": "</s>" for name in ("eos", "unk", "pad")}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class, **special}))
    return directory


@pytest.mark.parametrize("tokenizer_class", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_a_vocabulary_and_its_merges_are_enough(tmp_path: Path, tokenizer_class: str) -> None:
    tokenizer = Tokenizer.load(str(write_files(tmp_path, tokenizer_class)))
    expected = backend_tokenizer().encode("hello world", add_special_tokens=False).ids
    assert tokenizer.encode_now("hello world", add_special_tokens=False) == expected
    assert len(expected) < len("hello world")


def test_tokens_of_single_characters_need_no_merges(tmp_path: Path) -> None:
    directory = write_files(tmp_path, "Qwen2Tokenizer")
    vocab = json.loads((directory / "vocab.json").read_text())
    (directory / "vocab.json").write_text(json.dumps({token: i for token, i in vocab.items() if len(token) == 1}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Tokenizer.load(str(directory))
    assert len(tokenizer.encode_now("hello", add_special_tokens=False)) == len("hello")


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as refused:
        Tokenizer.load(str(directory))
    [sentence] = str(refused.value).splitlines()
    beginning = f"{directory} has no tokenizer.json, and none can be made from what it has: "
    assert sentence.startswith(beginning)
    return sentence.removeprefix(beginning)


def test_files_that_the_class_does_not_read_are_not_enough(tmp_path: Path) -> None:
    """Without a word, transformers makes a tokenizer that knows `<s>` and `</s>`."""
    assert refusal(write_files(tmp_path, "LlamaTokenizer")).startswith(
        "the result lacks tokens of vocab.json; fetch all"
    )


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "LlamaTokenizer"])
def test_special_tokens_alone_are_not_enough(tmp_path: Path, tokenizer_class: str) -> None:
    directory = write_files(tmp_path, tokenizer_class, vocab="vocab.txt")
    (directory / "merges.txt").unlink()
    assert refusal(directory).startswith("the result has no tokens but special ones; fetch all")


@pytest.mark.parametrize("merges", ["", "#version: 0.2\n"])
def test_tokens_that_nothing_puts_together_are_not_enough(tmp_path: Path, merges: str) -> None:
    directory = write_files(tmp_path, "Qwen2Tokenizer")
    (directory / "merges.txt").write_text(merges)
    assert refusal(directory).startswith("the result has no merges; fetch all")


def test_a_refusal_has_the_reason_that_transformers_gives_and_the_package_that_may_be_missing(tmp_path: Path) -> None:
    """For what is no SentencePiece model it takes files of tiktoken, which is not installed either."""
    directory = write_files(tmp_path, "LlamaTokenizer")
    (directory / "vocab.json").rename(directory / "tokenizer.model")
    reason, remedy = refusal(directory).split("; ")
    assert "tiktoken" in reason and remedy == "a *.model of SentencePiece needs the package sentencepiece"


def test_a_tokenizer_in_python_is_refused(tmp_path: Path) -> None:
    directory = write_files(tmp_path, "ByT5Tokenizer", vocab="vocab.txt")
    with pytest.raises(ModelLoadError, match="ByT5Tokenizer is no fast tokenizer"):
        Tokenizer.load(str(directory))
