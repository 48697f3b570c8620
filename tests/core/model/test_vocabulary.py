"""The digest of a vocabulary: equal where ids mean the same tokens, different where they do not."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.model.vocabulary import vocabulary_digest
from tests.demo_model import DEMO_MODEL

PIECES = {"a": 0, "b": 1, "ab": 2}


def saved(directory: Path, fields: dict[str, Any]) -> bytes:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(fields))
    return vocabulary_digest(directory)


def test_only_the_tokens_of_ids_count(tmp_path: Path) -> None:
    plain = saved(tmp_path, {"model": {"type": "BPE", "vocab": PIECES, "merges": ["a b"]}})
    assert len(plain) == 32
    shuffled = {"ab": 2, "a": 0, "b": 1}
    rules = {"pre_tokenizer": {"type": "ByteLevel"}, "added_tokens": []}
    assert saved(tmp_path, {**rules, "model": {"vocab": shuffled, "merges": [["a", "b"]]}}) == plain
    assert saved(tmp_path, {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.5], ["ab", -2.0]]}}) == plain
    assert saved(tmp_path, {"model": {"vocab": {"b": 0, "a": 1, "ab": 2}}}) != plain
    assert saved(tmp_path, {"model": {"vocab": {**PIECES, "c": 3}}}) != plain
    end = {"id": 3, "content": "</s>", "special": True}
    assert saved(tmp_path, {"model": {"vocab": PIECES}, "added_tokens": [end]}) not in (plain, b"")


def test_real_files_are_understood(tmp_path: Path) -> None:
    ours = vocabulary_digest(DEMO_MODEL)
    assert len(ours) == 32
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(tmp_path / "again")
    assert vocabulary_digest(tmp_path / "again") == ours
    for number, model in enumerate((models.BPE(vocab=PIECES, merges=[("a", "b")]), models.WordLevel(PIECES, "a"))):
        directory = tmp_path / str(number)
        directory.mkdir()
        Tokenizer(model).save(str(directory / "tokenizer.json"))
        assert vocabulary_digest(directory) == saved(tmp_path / "plain", {"model": {"vocab": PIECES}})


def test_no_tokenizer_and_an_unknown_form_have_no_digest(tmp_path: Path) -> None:
    assert vocabulary_digest(tmp_path) == b""
    unknown: list[dict[str, Any]] = [{}, {"model": []}, {"model": {"vocab": 5}}, {"added_tokens": [{"id": "1"}, 5]}]
    for fields in unknown:
        assert saved(tmp_path, fields) == b""
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not valid JSON"):
        vocabulary_digest(tmp_path)
