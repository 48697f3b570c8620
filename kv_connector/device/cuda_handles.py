"""GPU memory of other processes: CUDA's IPC handles and copies by address, through NVIDIA's own bindings.

torch has these only behind private names. Every function raises KVError when CUDA reports an error or is not there.
Invariant: an address from `open_handle` is used with the GPU that was selected then, and closed with `close_handle`.
"""

import ctypes
from typing import Any

from kvrelay.core.errors import KVError

HANDLE_BYTES = 64


def select_device(index: int) -> None:
    """Selects a GPU for the calling thread, until another is selected."""
    runtime = _runtime()
    _checked("cudaSetDevice", runtime.cudaSetDevice(index))


def allocation_at(address: int) -> tuple[int, int]:
    """Returns first address and size of the allocation that contains an address."""
    try:
        from cuda.bindings import driver

        failure, base, size = driver.cuMemGetAddressRange(address)
    except (ImportError, RuntimeError) as error:  # no bindings; no driver
        raise KVError(f"cuMemGetAddressRange: {error}") from error
    if int(failure) != 0:
        raise KVError(f"cuMemGetAddressRange: error {int(failure)}")
    return int(base), int(size)


def export_handle(base: int) -> bytes:
    """Returns `HANDLE_BYTES` with which other processes can open the allocation that begins at `base`."""
    (handle,) = _checked("cudaIpcGetMemHandle", _runtime().cudaIpcGetMemHandle(base))
    return handle_bytes(handle)


def open_handle(handle: bytes) -> int:
    """Maps another process's allocation; returns its first address here. CUDA refuses this process's own handles."""
    runtime = _runtime()
    wanted = handle_from(handle)
    (address,) = _checked(
        "cudaIpcOpenMemHandle", runtime.cudaIpcOpenMemHandle(wanted, runtime.cudaIpcMemLazyEnablePeerAccess)
    )
    return int(address)


def close_handle(address: int) -> None:
    _checked("cudaIpcCloseMemHandle", _runtime().cudaIpcCloseMemHandle(address))


def copy(to: int, source: int, num_bytes: int, stream: int) -> None:
    """Queues a copy on the stream. Between GPUs that cannot reach each other the driver goes through host memory."""
    runtime = _runtime()
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    _checked("cudaMemcpyAsync", runtime.cudaMemcpyAsync(to, source, num_bytes, kind, stream))


def handle_bytes(handle: Any) -> bytes:
    """Returns the content of a `cudaIpcMemHandle_t`, read at its address: CUDA 13's bindings do not name its field."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_from(content: bytes) -> Any:
    """Returns a `cudaIpcMemHandle_t` with the content that `handle_bytes` has returned."""
    assert len(content) == HANDLE_BYTES
    handle = _runtime().cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), content, HANDLE_BYTES)
    return handle


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise KVError(
            f"CUDA IPC needs the package 'cuda-bindings', which torch's builds for CUDA bring: {error}"
        ) from None
    return runtime


def _checked(doing: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the values of an answer without its error code. Raises KVError for an error, and clears it: CUDA would
    report it once more to the next caller."""
    error, *values = answer
    if int(error) != 0:
        runtime = _runtime()
        runtime.cudaGetLastError()
        _, text = runtime.cudaGetErrorString(error)
        raise KVError(f"{doing}: {text.decode()}")
    return tuple(values)
