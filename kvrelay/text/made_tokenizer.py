"""A tokenizer that transformers has made from other files than tokenizer.json.

It makes one without a word, too, where files are missing or are not those that its class reads. Invariant: one that
passes has all tokens of vocab.json, more than special ones, and a way to put them together from characters.
"""

import json
from pathlib import Path

import tokenizers

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.model.json_object import read_json_object


def check_made(made: tokenizers.Tokenizer, directory: Path) -> None:
    """Raises ModelLoadError if texts would lose their words, or come apart into characters."""
    vocab = made.get_vocab(with_added_tokens=True).keys()
    added = {token.content for token in made.get_added_tokens_decoder().values()}
    model = json.loads(made.model.__getstate__())
    listed = directory / "vocab.json"
    if listed.is_file() and not vocab >= read_json_object(listed).keys():
        raise cannot_be_made(directory, "the result lacks tokens of vocab.json")
    if vocab <= added:
        raise cannot_be_made(directory, "the result has no tokens but special ones")
    if model["type"] == "BPE" and not model["merges"] and any(len(token) > 1 for token in vocab - added):
        raise cannot_be_made(directory, "the result has no merges")


def cannot_be_made(directory: Path, reason: str) -> ModelLoadError:
    """Returns the error of a directory without tokenizer.json. It gives the first line of the reason."""
    if any(directory.glob("*.model")):
        remedy = "a *.model of SentencePiece needs the package sentencepiece"
    else:
        remedy = "fetch all of the model's files, or copy tokenizer.json from the model that it was trained from"
    first_line = reason.strip().partition("\n")[0].rstrip(".")
    return ModelLoadError(
        f"{directory} has no tokenizer.json, and none can be made from what it has: {first_line}; {remedy}"
    )
