"""The token with which a model's tokenizer ends a text. A model that was trained to end its turns with another token
than its base model often says so there alone.
"""

from pathlib import Path

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.model.json_object import read_json_object
from kvrelay.core.model.vocabulary import read_tokens


def tokenizer_end_token(directory: Path) -> int | None:
    """Returns the id that `tokenizer.json` has for the `eos_token` of `tokenizer_config.json`. None if they do not say
    it: files that are missing or odd are refused by whoever needs a tokenizer."""
    try:
        named = read_json_object(directory / "tokenizer_config.json").get("eos_token")
        content = named.get("content") if isinstance(named, dict) else named
        return next((token_id for token_id, token in read_tokens(directory).items() if token == content), None)
    except ModelLoadError:
        return None
