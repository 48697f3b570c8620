"""Where a model lies: the directory that it was given as, or its place in the local Hugging Face cache.

Invariant: whatever is read there ends. A FIFO, socket or device in place of a file would keep its reader waiting.
"""

from itertools import chain
from pathlib import Path

from kvrelay.core.errors import ModelLoadError


def resolve_model_directory(model: str) -> Path:
    """Returns the directory of a model, given as a directory or as a Hugging Face id whose files are in the local
    cache. Downloads nothing. Raises ModelLoadError, also for a directory with something that is no file."""
    if not model:
        raise ModelLoadError("the model's name is empty: give a directory or a Hugging Face id")
    directory = Path(model).expanduser()
    if directory.is_dir():
        return _of_files(directory)
    if directory.is_file():
        raise ModelLoadError(f"{model} is a file: a model is a directory with config.json, tokenizer and safetensors")
    # Not above: it takes a third of a second, which whoever has a directory need not wait.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _of_files(Path(snapshot_download(model, local_files_only=True)))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(
            f"{model} is neither a directory nor a model in the local Hugging Face cache; kvrelay downloads nothing: "
            "`hf download` fetches a model by its name"
        ) from error


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Raises ModelLoadError if a file begins as what a clone without Git LFS has in the place of a large one
    (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""
    if beginning.startswith(b"version https://git-lfs"):
        raise ModelLoadError(f"{path} is a pointer of Git LFS, not the file: `git lfs pull` in its folder fetches it")


def _of_files(directory: Path) -> Path:
    try:
        for path in chain(directory.glob("[!.]*"), directory.glob("[!.]*/[!.]*")):  # chat templates have a folder
            if path.exists() and not path.is_file() and not path.is_dir():
                raise ModelLoadError(f"{path} is a FIFO, a socket or a device: a model is read from regular files only")
    except OSError as error:
        raise ModelLoadError(f"cannot read {error.filename}: {error.strerror}") from error
    return directory
