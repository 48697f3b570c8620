"""The bytes of a checkpoint: one pass over a file that copies and digests all of it, and single tensors.

Invariant: the pass reads every byte of a file exactly once, into memory that the caller provides. The digest of a file
therefore covers exactly what was loaded.
"""

from collections.abc import Callable, Mapping
from typing import BinaryIO

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvrelay.core.errors import ModelLoadError
from kvrelay.engine.layers.weight_format import Slot
from kvrelay.engine.loading.checkpoint import INTEGER_DTYPE, WEIGHT_DTYPES, CheckpointFile, StoredTensor
from kvrelay.engine.loading.staging import Staging

_CHUNK_BYTES = 4 * 1024 * 1024  # small enough to be digested in the cache; a multiple of every element size
_STORED_DTYPES = WEIGHT_DTYPES | {INTEGER_DTYPE: torch.int32}


def read_tensors(file: CheckpointFile, slots: Mapping[str, Slot], advance: Callable[[int], None]) -> bytes:
    """Copies the tensors of a file one by one into their `slots`, which have the same shapes. Skips those without one.

    Calls `advance` with the number of bytes read since the last call. Returns the xxh3-128 digest of the whole file, 16
    bytes. Raises ModelLoadError.
    """
    try:
        with file.path.open("rb", buffering=0) as stream:
            reading = _Pass(stream, advance)
            reading.read_header(file)
            for tensor in file.tensors:
                slot = slots.get(tensor.name)
                memory = None if slot is None else slot.open()
                reading.read_tensor(tensor, memory)
                if slot is not None and memory is not None:
                    _hand_over(slot, memory, tensor)
            return reading.digest()
    except OSError as error:
        raise ModelLoadError(f"cannot read {file.path}: {error.strerror}") from error


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


class _Pass:
    """Reads a file from its beginning to its end. `advance` is told how many bytes each chunk had."""

    def __init__(self, stream: BinaryIO, advance: Callable[[int], None]) -> None:
        self._stream = stream
        self._advance = advance
        self._digest = xxhash.xxh3_128()
        self._scratch = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
        self._staging = Staging(_CHUNK_BYTES)

    def digest(self) -> bytes:
        """Returns the digest of what has been read."""
        return self._digest.digest()

    def read_header(self, file: CheckpointFile) -> None:
        """Reads the header once more. Raises ModelLoadError unless it is the one that `file` describes: another file in
        its place would be read by the wrong offsets, and yet get the digest that those who read it by the right ones
        know."""
        header = bytearray(file.header_bytes)
        is_whole = _read_all(self._stream, memoryview(header))
        if not is_whole or xxhash.xxh3_128_digest(header) != file.header_digest:
            raise ModelLoadError(f"{file.path} changed while it was read: start again once it is complete")
        self._digest.update(header)
        self._advance(file.header_bytes)

    def read_tensor(self, tensor: StoredTensor, memory: Tensor | None) -> None:
        """Reads the next tensor, which is converted into `memory` if there is one."""
        stored_dtype = _STORED_DTYPES.get(tensor.dtype, torch.uint8)
        direct = memory is not None and memory.dtype == stored_dtype and memory.device.type == "cpu"
        staged = memory is not None and memory.is_cuda
        flat = None if memory is None else memory.view(-1)
        for begin in range(0, tensor.num_bytes, _CHUNK_BYTES):
            num_bytes = min(_CHUNK_BYTES, tensor.num_bytes - begin)
            first, last = begin // stored_dtype.itemsize, (begin + num_bytes) // stored_dtype.itemsize
            part = None if flat is None else flat[first:last]
            if direct and part is not None:
                chunk = part.view(torch.uint8)
            else:
                chunk = self._staging.chunk() if staged else self._scratch
            chunk = chunk[:num_bytes]
            buffer = memoryview(chunk.numpy().data)
            if not _read_all(self._stream, buffer):
                raise ModelLoadError(f"{tensor.file} ended inside tensor {tensor.name}: it changed while it was read")
            self._digest.update(buffer)
            if part is not None and staged:
                self._staging.send(chunk.view(stored_dtype), part)
            elif part is not None and not direct:
                part.copy_(chunk.view(stored_dtype))
            self._advance(num_bytes)


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
