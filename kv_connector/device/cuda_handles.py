"""Device memory of other processes: CUDA's IPC handles and copies by address, through NVIDIA's own bindings.

torch has these only behind private names. Needs a card for anything but errors, which come as KVError.
Invariant: an address from `open_handle` is used with the device that was current, and given back with `close_handle`.
"""

import ctypes
from typing import Any

from kvrelay.core.errors import KVError

HANDLE_BYTES = 64


def select_device(index: int) -> None:
    """For this thread, until somebody selects another."""
    runtime = _runtime()
    _checked("cudaSetDevice", runtime.cudaSetDevice(index))


def allocation_at(address: int) -> tuple[int, int]:
    """First address and size of the allocation that an address is in."""
    try:
        from cuda.bindings import driver

        failure, base, size = driver.cuMemGetAddressRange(address)
    except (ImportError, RuntimeError) as error:  # no bindings; no driver
        raise KVError(f"cuMemGetAddressRange: {error}") from error
    if int(failure) != 0:
        raise KVError(f"cuMemGetAddressRange: error {int(failure)}")
    return int(base), int(size)


def export_handle(base: int) -> bytes:
    """`HANDLE_BYTES` that let other processes open the allocation that begins here."""
    (handle,) = _checked("cudaIpcGetMemHandle", _runtime().cudaIpcGetMemHandle(base))
    return handle_bytes(handle)


def open_handle(handle: bytes) -> int:
    """Where the allocation begins in this process. Not for handles of this very process: CUDA refuses those."""
    runtime = _runtime()
    wanted = handle_from(handle)
    (address,) = _checked(
        "cudaIpcOpenMemHandle", runtime.cudaIpcOpenMemHandle(wanted, runtime.cudaIpcMemLazyEnablePeerAccess)
    )
    return int(address)


def close_handle(address: int) -> None:
    _checked("cudaIpcCloseMemHandle", _runtime().cudaIpcCloseMemHandle(address))


def copy(to: int, source: int, num_bytes: int, stream: int) -> None:
    """Queued on the stream. Between cards that cannot reach each other the driver goes through host memory."""
    runtime = _runtime()
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    _checked("cudaMemcpyAsync", runtime.cudaMemcpyAsync(to, source, num_bytes, kind, stream))


def handle_bytes(handle: Any) -> bytes:
    """What is in a `cudaIpcMemHandle_t`, by its address: the field that holds it has no name in CUDA 13's bindings."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_from(content: bytes) -> Any:
    """The reverse."""
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
    """What the call returned behind its error. CUDA keeps an error for whoever asks next: it is taken back here."""
    error, *values = answer
    if int(error) != 0:
        runtime = _runtime()
        runtime.cudaGetLastError()
        _, text = runtime.cudaGetErrorString(error)
        raise KVError(f"{doing}: {text.decode()}")
    return tuple(values)
