"""Where a model lies: the directory that it was given as, or its place in the local Hugging Face cache."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from kvrelay.core.errors import ModelLoadError


def resolve_model_directory(model: str) -> Path:
    """Returns the directory of a model, given as a directory or as a Hugging Face id whose files are in the local
    cache. Downloads nothing. Raises ModelLoadError."""
    if not model:
        raise ModelLoadError("the model's name is empty: give a directory or a Hugging Face id")
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(
            f"{model} is neither a directory nor a model in the local Hugging Face cache; kvrelay downloads nothing: "
            "`hf download` fetches a model by its name"
        ) from error
