"""The safetensors files of a Hugging Face directory: where each tensor is.

The format (https://github.com/huggingface/safetensors#format) is an 8-byte little-endian header length, a JSON header,
and the tensors without gaps. Invariant: what `open_checkpoint` returns has been checked: the tensors fill their files
exactly, and each is as long as its shape says.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.model.directory import refuse_dangling, refuse_pointer
from kvrelay.core.model.json_object import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000
_ITEM_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8}
_ITEM_BITS |= {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8}

WEIGHT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGER_DTYPE = "I32"  # packed codes and group indices

_Size = Annotated[int, Field(ge=0, lt=2**63)]


class _Entry(BaseModel):
    """A tensor in a header. torch knows no shape longer than this."""

    model_config = ConfigDict(strict=True)

    dtype: str
    shape: Annotated[list[_Size], Field(max_length=64)]
    data_offsets: Annotated[list[_Size], Field(min_length=2, max_length=2)]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `dtype` is the format's name for it (BF16), `num_bytes` its length in `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A safetensors file. `tensors` are in the order of their bytes, which follow the first `header_bytes` bytes
    without gaps. `header_digest` is the xxh3-128 digest of those bytes."""

    path: Path
    header_bytes: int
    header_digest: bytes
    tensors: tuple[StoredTensor, ...]

    @property
    def num_bytes(self) -> int:
        return self.header_bytes + sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a checkpoint, sorted by name. Every tensor is in exactly one of them."""

    files: tuple[CheckpointFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def tensors(self) -> dict[str, StoredTensor]:
        return {tensor.name: tensor for file in self.files for tensor in file.tensors}


def open_checkpoint(directory: Path) -> Checkpoint:
    """Reads the headers of a checkpoint. Raises ModelLoadError, which names the file and the tensor, if any."""
    if (directory / SINGLE_FILE).is_file():
        return Checkpoint((_open_file(directory / SINGLE_FILE),))
    index = directory / INDEX_FILE
    if not index.is_file():
        refuse_dangling(directory / SINGLE_FILE)
        refuse_dangling(index)
        raise ModelLoadError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{_found_instead(directory)}")
    weight_map = _weight_map(index)
    checkpoint = Checkpoint(tuple(_open_file(directory / name) for name in sorted(set(weight_map.values()))))
    found: dict[str, Path] = {}
    for tensor in (tensor for file in checkpoint.files for tensor in file.tensors):
        if tensor.name in found:
            raise ModelLoadError(f"tensor {tensor.name} is in both {found[tensor.name]} and {tensor.file}")
        found[tensor.name] = tensor.file
    for name, file_name in weight_map.items():
        if name not in found:
            raise ModelLoadError(
                f"tensor {name} is missing from {directory / file_name}, where {INDEX_FILE} says it is"
            )
    return checkpoint


def _found_instead(directory: Path) -> str:
    """Returns the end of the message about weights files that are not there: what is, and what to do."""
    found = sorted(path.name for path in directory.glob("[!.]*.safetensors"))
    if not found:
        return ": fetch all of the model's files; other formats of weights (.bin, GGUF) are not supported"
    if len(found) == 1:
        return f", but {found[0]}: rename it to {SINGLE_FILE}"
    shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    return (
        f", but {shown}: fetch {INDEX_FILE} if they are parts of one model; otherwise rename the one that is the model "
        f"to {SINGLE_FILE}"
    )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map must map tensor names to files")
    for name, file_name in weight_map.items():
        # No hidden file is looked at before, so it might be a pipe that is never written to.
        if not isinstance(file_name, str) or Path(file_name).name != file_name or file_name.startswith("."):
            raise ModelLoadError(
                f"{index}: weight_map: tensor {name} must be in a file beside the index, not {file_name!r}"
            )
    return weight_map


def _open_file(path: Path) -> CheckpointFile:
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            length = stream.read(8)
            header_length = int.from_bytes(length, "little")
            if size < 8 or not 0 < header_length <= min(size - 8, _MAX_HEADER_BYTES):
                refuse_pointer(path, length + stream.read(64))
                raise ModelLoadError(f"{path} is not a safetensors file, or is truncated")
            text = stream.read(header_length)
            header = _header(text)
    except FileNotFoundError as error:
        refuse_dangling(path)
        raise ModelLoadError(f"the weights file {path} is missing: fetch all of the model's files") from error
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not a safetensors file: {error}") from error
    tensors = _stored_tensors(header, path, data_bytes=size - 8 - header_length)
    return CheckpointFile(path, 8 + header_length, xxhash.xxh3_128_digest(length + text), tensors)


def _header(text: bytes) -> dict[str, Any]:
    """Returns the entries of a header. Raises ValueError for one that is no JSON object, or that names a tensor twice,
    because readers differ in which of the two they take."""
    try:
        entries = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"its header must hold a JSON object, not a {type(entries).__name__}")
    entries.pop("__metadata__", None)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice} is in it twice")
    return found


def _stored_tensors(header: Mapping[str, Any], path: Path, *, data_bytes: int) -> tuple[StoredTensor, ...]:
    """Returns the tensors of a header. Raises ModelLoadError unless they fill the file's data exactly, each as long as
    its shape says."""
    entries = {name: _entry(entry, name, path) for name, entry in header.items()}
    tensors: list[StoredTensor] = []
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, following = entry.data_offsets
        expected = math.prod(entry.shape) * _ITEM_BITS.get(entry.dtype, 0) // 8
        if begin != end or following < begin or (entry.dtype in _ITEM_BITS and following - begin != expected):
            raise ModelLoadError(
                f"{path}: tensor {name}: bytes {begin} to {following} do not fit its shape {entry.shape} or its "
                "neighbours"
            )
        tensors.append(StoredTensor(name, path, entry.dtype, tuple(entry.shape), following - begin))
        end = following
    if end != data_bytes:
        last = f" (the last tensor is {tensors[-1].name})" if tensors else ""
        raise ModelLoadError(
            f"{path} is truncated or damaged: it has {data_bytes} bytes of tensors instead of {end}{last}"
        )
    return tuple(tensors)


def _entry(entry: Any, name: str, path: Path) -> _Entry:
    try:
        return _Entry.model_validate(entry)
    except ValidationError as error:
        details = error.errors()[0]
        field = ".".join(map(str, details["loc"]))
        raise ModelLoadError(
            f"{path}: tensor {name}: malformed header entry: {field + ': ' if field else ''}{details['msg']}"
        ) from error
