"""Reads the JSON files of a model's directory.

Invariant: what is returned is nested at most 200 deep, so that nothing which walks through it runs out of stack.
"""

from pathlib import Path
from typing import Any

from pydantic_core import from_json

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.model.directory import refuse_dangling, refuse_pointer


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object. Raises ModelLoadError, which names the file."""
    try:
        content = path.read_bytes()
        refuse_pointer(path, content)
        loaded = from_json(content)
    except FileNotFoundError as error:
        refuse_dangling(path)
        raise ModelLoadError(
            f"{path.parent} has no {path.name}: it is not a Hugging Face model directory, or not all of one"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(loaded).__name__}")
    return loaded
