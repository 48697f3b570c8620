"""The end token of a model's tokenizer ends an output, besides those of its configuration."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvrelay import LLM, SamplingParams
from tests.engine.load_on_cpu import load
from tests.engine.tiny_models import make_tiny_model

PROMPT = [5, 17, 250, 3, 3, 99]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path, with_tokenizer=True)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def name_end(model: Path, eos_token: Any) -> None:
    """Makes the tokenizer of a model end with another token than all its other files say."""
    edit(model / "tokenizer_config.json", eos_token=eos_token)


def test_an_output_ends_with_the_end_token_of_the_tokenizer(model: Path) -> None:
    """Others know what a turn ends with from nowhere else."""
    llm = LLM(str(model), threads=1, num_blocks=64)
    [before] = llm.generate([PROMPT], GREEDY, progress=False)
    tokens = before.outputs[0].token_ids
    end = next(token for token in tokens[1:] if token >= 260 and tokens.index(token) > 0)
    name_end(model, llm.tokenizer.backend.id_to_token(end))
    llm = LLM(str(model), threads=1, num_blocks=64)
    ignoring = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first, second = llm.generate([PROMPT, PROMPT], [GREEDY, ignoring], progress=False)
    assert first.outputs[0].token_ids == tokens[: tokens.index(end) + 1]
    assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("stop", end)
    assert second.outputs[0].token_ids == tokens
    llm._engine.check_idle()


@pytest.mark.parametrize("as_object", [False, True])
def test_it_is_added_and_mentioned_once(model: Path, as_object: bool, caplog: pytest.LogCaptureFixture) -> None:
    known = load(model)
    assert known.config.eos_token_ids == (257,)
    name_end(model, {"__type": "AddedToken", "content": "<|pad|>", "special": True} if as_object else "<|pad|>")
    with caplog.at_level(logging.INFO):
        found = load(model)
    assert found.config.eos_token_ids == (257, 258)
    assert [record.getMessage() for record in caplog.records if "eos_token" in record.getMessage()] == [
        "token 258 ends an output as well: tokenizer_config.json has it as eos_token, eos_token_id is [257]"
    ]
    assert found.fingerprint == known.fingerprint, "it changes no KV"


def test_it_may_be_the_only_one(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "generation_config.json").unlink()
    edit(model / "config.json", eos_token_id=None)
    assert load(model).config.eos_token_ids == (257,)
    assert "only stop conditions" not in caplog.text


def test_a_token_that_was_added_has_the_id_of_its_entry(model: Path) -> None:
    vocabulary = json.loads((model / "tokenizer.json").read_text())
    del vocabulary["model"]["vocab"]["\u0120t300"]
    vocabulary["added_tokens"].append({"id": 300, "content": "<|im_end|>", "special": True})
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    name_end(model, "<|im_end|>")
    assert load(model).config.eos_token_ids == (257, 300)


def test_it_may_be_the_first_of_the_vocabulary(model: Path) -> None:
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    name_end(model, next(text for text, token in vocabulary.items() if token == 0))
    assert load(model).config.eos_token_ids == (257, 0)


@pytest.mark.parametrize("eos_token", [None, 258, [], {}, {"content": 258}, "", "<|no such token|>", "<|end|>"])
def test_an_end_token_that_is_none_or_known_changes_nothing(model: Path, eos_token: Any) -> None:
    name_end(model, eos_token)
    assert load(model).config.eos_token_ids == (257,)


def test_a_token_beyond_the_models_changes_nothing(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path, with_tokenizer=True)
    for number, name in ((320, "<|beyond|>"), (-1, "<|before|>")):
        added = [{"id": number, "content": name, "special": True}]
        edit(model / "tokenizer.json", added_tokens=added)
        name_end(model, name)
        assert load(model).config.eos_token_ids == (257,)


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "null", '{"added_tokens": 7, "model": []}', "[" * 100_000])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_missing_or_odd_change_nothing(model: Path, file: str, text: str | None) -> None:
    """A tokenizer that cannot be loaded is refused where one is needed."""
    name_end(model, "<|pad|>")
    (model / file).unlink()
    if text is not None:
        (model / file).write_text(text)
    assert load(model).config.eos_token_ids == (257,)
