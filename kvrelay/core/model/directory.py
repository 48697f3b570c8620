"""Where a model lies: the directory that it was given as, or its place in the local Hugging Face cache.

Invariant: whatever is read there ends. A FIFO, socket or device in place of a file would keep its reader waiting.
"""

from contextlib import suppress
from itertools import chain
from pathlib import Path
from stat import S_IFDIR, S_IFMT, S_IFREG

from kvrelay.core.errors import ModelLoadError


def resolve_model_directory(model: str) -> Path:
    """Returns the directory of a model, given as a directory or as a Hugging Face id whose files are in the local
    cache. Downloads nothing. Raises ModelLoadError, also for a directory that cannot be read, or with something that is
    no file."""
    if not model:
        raise ModelLoadError("the model's name is empty: give a directory or a Hugging Face id")
    try:
        return _resolved(model)
    except OSError as error:
        raise ModelLoadError(f"cannot read {error.filename or model}: {error.strerror or error}") from error


def _resolved(model: str) -> Path:
    directory = Path(model)
    with suppress(RuntimeError):  # no such user, or no home: a name as any other
        directory = directory.expanduser()
    if _kind(directory) == S_IFDIR:
        return _of_files(directory)
    if _kind(directory) == S_IFREG:
        raise ModelLoadError(f"{model} is a file: a model is a directory with config.json, tokenizer and safetensors")
    # Not above: it takes a third of a second, which whoever has a directory need not wait.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _of_files(Path(snapshot_download(model, local_files_only=True)))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(
            f"{model} is neither a directory nor a model in the local Hugging Face cache; kvrelay downloads nothing: "
            "`hf download` fetches a model by its name. In the cache, a name finds only the revision main: give "
            "another one as the directory of its snapshot"
        ) from error


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Raises ModelLoadError if a file begins as what a clone without Git LFS has in the place of a large one
    (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""
    if beginning.startswith(b"version https://git-lfs"):
        raise ModelLoadError(f"{path} is a pointer of Git LFS, not the file: `git lfs pull` in its folder fetches it")


def refuse_dangling(path: Path) -> None:
    """Raises ModelLoadError if `path` is a link to what is not there. The files of a snapshot in the Hugging Face cache
    are links to another folder of the cache, which may not have been copied or mounted with it."""
    if path.is_symlink() and not path.exists():
        raise ModelLoadError(
            f"{path} is a link to {path.readlink()}, which is not there: if it is of a Hugging Face cache, make the "
            "model's whole folder in the cache available, blobs too"
        )


def _of_files(directory: Path) -> Path:
    shown = [path for path in directory.iterdir() if not path.name.startswith(".")]  # `glob` would pass over an error
    for path in chain(shown, directory.glob("[!.]*/[!.]*")):  # chat templates have a folder
        if _kind(path) not in (0, S_IFREG, S_IFDIR):
            raise ModelLoadError(f"{path} is a FIFO, a socket or a device: a model is read from regular files only")
    return directory


def _kind(path: Path) -> int:
    """Returns what kind of file there is, 0 if there is none. Raises OSError where `is_file` may only say no: if that
    cannot be looked at."""
    try:
        return S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0
