"""The files of a model's directory that a tokenizer is made from.

Looking for them takes no time, unlike loading the tokenizer: a model without one is refused before its weights are
read.
"""

from pathlib import Path

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.model.directory import refuse_dangling

# tokenizer.json has everything; from the others transformers can make one, some with the help of another package.
_PATTERNS = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")


def refuse_without_tokenizer(directory: Path) -> None:
    """Raises ModelLoadError if a model's directory has no file that a tokenizer could be made from."""
    if not any(path.is_file() for pattern in _PATTERNS for path in directory.glob(pattern)):
        refuse_dangling(directory / "tokenizer.json")
        raise ModelLoadError(
            f"{directory} has no tokenizer.json, nor anything else that a tokenizer is made from: fetch all of the "
            "model's files, or copy those of the tokenizer from the model that it was trained from"
        )
