"""The safetensors files of a Hugging Face directory: where each tensor is, and one pass that copies and digests all.

The format (https://github.com/huggingface/safetensors#format) is an 8-byte little-endian header length, a JSON header,
and the tensors without gaps. Invariant: the pass reads every byte of every file exactly once, into memory that the
caller provides. The digest of a file therefore covers exactly what was loaded.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.json_object import read_json_object
from kvrelay.core.model_directory import refuse_pointer
from kvrelay.engine.layers.weight_format import Slot
from kvrelay.engine.loading.staging import Staging

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_CHUNK_BYTES = 4 * 1024 * 1024  # small enough to be digested in the cache; a multiple of every element size
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8}
_ITEM_BITS |= {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8}

WEIGHT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGER_DTYPE = "I32"  # packed codes and group indices
_STORED_DTYPES = WEIGHT_DTYPES | {INTEGER_DTYPE: torch.int32}

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
        raise ModelLoadError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; other weight formats are not supported"
        )
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


def read_tensor(tensor: StoredTensor) -> Tensor:
    """Reads one tensor as it is stored, on the CPU. Raises ModelLoadError."""
    try:
        with safe_open(tensor.file, framework="pt") as file:
            stored = file.get_tensor(tensor.name)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"cannot read tensor {tensor.name} of {tensor.file}: {error}") from error
    assert isinstance(stored, Tensor)
    return stored


def hold_equal_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Tells whether two matrices have the same shape and values. Reads them in parts. Raises ModelLoadError."""
    if first.shape != second.shape or len(first.shape) != 2:
        return False
    num_rows = first.shape[0]
    step = max(1, _CHUNK_BYTES * num_rows // max(1, first.num_bytes))
    try:
        with safe_open(first.file, framework="pt") as file, safe_open(second.file, framework="pt") as other:
            rows, other_rows = file.get_slice(first.name), other.get_slice(second.name)
            return all(
                torch.equal(rows[begin : begin + step].float(), other_rows[begin : begin + step].float())
                for begin in range(0, num_rows, step)
            )
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"cannot compare {first.name} of {first.file} with {second.name}: {error}") from error


def read_tensors(file: CheckpointFile, slots: Mapping[str, Slot], advance: Callable[[int], None]) -> bytes:
    """Copies the tensors of a file one by one into their `slots`, which have the same shapes. Skips those without one.

    Calls `advance` with the number of bytes read since the last call. Returns the xxh3-128 digest of the whole file, 16
    bytes. Raises ModelLoadError.
    """
    digest = xxhash.xxh3_128()
    scratch, staging = torch.empty(_CHUNK_BYTES, dtype=torch.uint8), Staging(_CHUNK_BYTES)
    try:
        with file.path.open("rb", buffering=0) as stream:
            _read_header(stream, file, digest)
            advance(file.header_bytes)
            for tensor in file.tensors:
                slot = slots.get(tensor.name)
                memory = None if slot is None else slot.open()
                _read_tensor(stream, tensor, memory, scratch, staging, digest, advance)
                if slot is not None and memory is not None:
                    _hand_over(slot, memory, tensor)
    except OSError as error:
        raise ModelLoadError(f"cannot read {file.path}: {error.strerror}") from error
    return digest.digest()


def _read_header(stream: BinaryIO, file: CheckpointFile, digest: xxhash.xxh3_128) -> None:
    """Reads the header once more. Raises ModelLoadError unless it is the one that `file` describes: another file in its
    place would be read by the wrong offsets, and yet get the digest that those who read it by the right ones know."""
    header = bytearray(file.header_bytes)
    is_whole = _read_all(stream, memoryview(header))
    if not is_whole or xxhash.xxh3_128_digest(header) != file.header_digest:
        raise ModelLoadError(f"{file.path} changed while it was read: start again once it is complete")
    digest.update(header)


def _read_tensor(
    stream: BinaryIO,
    tensor: StoredTensor,
    memory: Tensor | None,
    scratch: Tensor,
    staging: Staging,
    digest: xxhash.xxh3_128,
    advance: Callable[[int], None],
) -> None:
    stored_dtype = _STORED_DTYPES.get(tensor.dtype, torch.uint8)
    direct = memory is not None and memory.dtype == stored_dtype and memory.device.type == "cpu"
    staged = memory is not None and memory.is_cuda
    flat = None if memory is None else memory.view(-1)
    for begin in range(0, tensor.num_bytes, _CHUNK_BYTES):
        num_bytes = min(_CHUNK_BYTES, tensor.num_bytes - begin)
        first, last = begin // stored_dtype.itemsize, (begin + num_bytes) // stored_dtype.itemsize
        part = None if flat is None else flat[first:last]
        chunk = part.view(torch.uint8) if direct and part is not None else (staging.chunk() if staged else scratch)
        chunk = chunk[:num_bytes]
        buffer = memoryview(chunk.numpy().data)
        if not _read_all(stream, buffer):
            raise ModelLoadError(f"{tensor.file} ended inside tensor {tensor.name}: it changed while it was read")
        digest.update(buffer)
        if part is not None and staged:
            staging.send(chunk.view(stored_dtype), part)
        elif part is not None and not direct:
            part.copy_(chunk.view(stored_dtype))
        advance(num_bytes)


def _hand_over(slot: Slot, memory: Tensor, tensor: StoredTensor) -> None:
    try:
        slot.filled(memory)
    except ValueError as error:
        raise ModelLoadError(f"tensor {tensor.name} in {tensor.file} cannot be used: {error}") from error


def _read_all(stream: BinaryIO, buffer: memoryview) -> bool:
    """Fills the buffer from a raw file, which may give less than it is asked for. Tells whether there was enough."""
    done = 0
    while done < len(buffer):
        count = stream.readinto(buffer[done:])  # type: ignore[attr-defined]  # a raw file has it
        if not count:
            return False
        done += count
    return True


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map must map tensor names to files")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
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
        raise ModelLoadError(f"the weights file {path} is missing") from error
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
