"""A KV pool in CUDA memory: copied through pinned host memory, or from GPU to GPU, on a stream of its own.

Needs a GPU; its copies are checked at every start (`self_test.py`).
Invariant: nothing here waits for the engine's steps, nor they for what is here. The engine gives a block to a transfer
only when no step in flight reads or writes it, and uses what has arrived only in steps that it queues afterwards.
"""

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import torch

from kv_connector.base import PoolBuffer
from kv_connector.device import cuda_handles
from kv_connector.device.memory import BlockCopy, CopyRun, DeviceBuffer, PeerMemory, copy_runs
from kvrelay.core.errors import KVError

BlockDigests = Callable[[Sequence[int]], list[bytes]]
"""Returns digests of blocks by id, computed on the current stream, for which it waits."""

# CUDA's handle of the allocation, the GPU's UUID, where the pool begins in the allocation.
_EXPORT = struct.Struct(f"<{cuda_handles.HANDLE_BYTES}s16sQ")

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CudaPeer:
    """Implements PeerMemory. `first`: address of the peer's block 0. `opened`: address at which CUDA has mapped the
    allocation, on the GPU `index`; None for our own pool."""

    first: int
    opened: int | None
    index: int

    def close(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            try:
                cuda_handles.select_device(self.index)
                cuda_handles.close_handle(opened)
            except KVError as error:
                _logger.warning("a peer's device memory stays mapped: %s", error)


class CudaMemory:
    """Implements DirectMemory over `pool`, `[num_blocks, ...]`, contiguous. `make_digests` gets the pool as
    `[num_blocks, block_bytes]`, uint8; without it blocks can only be copied through the host. Waits once for the
    device, which may still be filling the pool with zeros."""

    kind = "cuda"

    def __init__(
        self,
        pool: torch.Tensor,
        make_digests: Callable[[torch.Tensor], BlockDigests] | None = None,
    ) -> None:
        assert pool.is_cuda and pool.is_contiguous()
        self.num_blocks = pool.shape[0]
        self._rows = pool.view(torch.uint8).view(self.num_blocks, -1)  # [num_blocks, block_bytes]
        self._digests = None if make_digests is None else make_digests(self._rows)
        self._device = pool.device
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._staging: torch.Tensor | None = None  # [num_slots, block_bytes] in host memory
        self._pinned = False
        self._exported = b""
        torch.cuda.synchronize(pool.device)

    def attach(self, staging: PoolBuffer) -> None:
        host = torch.frombuffer(staging.memory, dtype=torch.uint8)
        with self._errors("pinning"):
            # Zero is success. 1: portable, that is, pinned for every context of this process.
            failure = int(_runtime().cudaHostRegister(host.data_ptr(), host.numel(), 1))
        self._pinned = failure == 0
        if not self._pinned:
            self._forget_last_error()
            _logger.warning(
                "%d MiB of staging memory cannot be pinned (CUDA error %d): KV moves slowly. Allow this process to "
                "lock memory (ulimit -l, docker: --ulimit memlock=-1), or lower --kv-staging-gib",
                host.numel() >> 20, failure,
            )  # fmt: skip
        self._staging = host.view(staging.num_blocks, -1)

    def to_host(self, copies: Sequence[BlockCopy]) -> None:
        staging = self._require_staging()
        with self._copying("copying to the host"):
            for run in copy_runs(copies):
                _slots(staging, run).copy_(_blocks(self._rows, run), non_blocking=True)

    def from_host(self, copies: Sequence[BlockCopy]) -> None:
        staging = self._require_staging()
        with self._copying("copying from the host"):
            for run in copy_runs(copies):
                _blocks(self._rows, run).copy_(_slots(staging, run), non_blocking=True)

    def detach(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None and self._pinned:
            with self._errors("unpinning"):
                _runtime().cudaHostUnregister(staging.data_ptr())

    def buffer(self, block_id: int) -> DeviceBuffer:
        row: DeviceBuffer = self._rows[block_id]
        return row

    def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        assert self._digests is not None, "made to be reached directly"
        with self._errors("digesting"), torch.cuda.stream(self._stream):
            return self._digests(block_ids)

    def quiesce(self) -> None:
        with self._errors("waiting for the device"):
            torch.cuda.synchronize(self._device)

    def export(self) -> bytes:
        if not self._exported:
            self._select()
            base, _ = cuda_handles.allocation_at(self._rows.data_ptr())
            offset = self._rows.data_ptr() - base
            self._exported = _EXPORT.pack(cuda_handles.export_handle(base), _uuid(self._device), offset)
        return self._exported

    def open(self, handle: bytes, num_blocks: int) -> CudaPeer:
        if len(handle) != _EXPORT.size:
            raise KVError("not a handle of CUDA memory")
        if handle == self._exported:
            return CudaPeer(self._rows.data_ptr(), None, self._index)
        allocation, uuid, offset = _EXPORT.unpack(handle)
        try:
            return self._map(self._index, allocation, offset, num_blocks)
        except KVError as error:
            # The GPUs cannot reach each other: map the pool on the peer's, then the driver copies through the host.
            index = _device_with(uuid)
            if index is None or index == self._index:
                raise
            _logger.info("no direct way to GPU %d (%s): the driver copies through host memory", index, error)
            return self._map(index, allocation, offset, num_blocks)

    def copy_from(self, peer: PeerMemory, copies: Sequence[BlockCopy]) -> None:
        assert isinstance(peer, CudaPeer)
        block_bytes = self._rows.shape[1]
        with self._copying("copying from a peer"):
            self._select()
            for run in copy_runs(copies):
                ours = self._rows.data_ptr() + run.block_id * block_bytes
                theirs = peer.first + run.slot * block_bytes
                cuda_handles.copy(ours, theirs, run.count * block_bytes, self._stream.cuda_stream)

    def _map(self, index: int, allocation: bytes, offset: int, num_blocks: int) -> CudaPeer:
        cuda_handles.select_device(index)
        try:
            opened = cuda_handles.open_handle(allocation)
            peer = CudaPeer(opened + offset, opened, index)
            try:
                base, size = cuda_handles.allocation_at(opened)
                if base != opened or offset + num_blocks * self._rows.shape[1] > size:
                    raise KVError(
                        f"a peer's allocation of {size} bytes cannot hold {num_blocks} blocks from {offset} on"
                    )
            except KVError:
                peer.close()
                raise
            return peer
        finally:
            self._select()

    def _select(self) -> None:
        cuda_handles.select_device(self._index)

    @property
    def _index(self) -> int:
        return self._rows.get_device()

    def _wait(self) -> None:
        """Waits for everything queued on our stream so far. The thread sleeps, and others run."""
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(self._stream)
        end.synchronize()

    def _forget_last_error(self) -> None:
        """Clears a failed call's error, which CUDA would otherwise report once more to the engine."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)

    def _require_staging(self) -> torch.Tensor:
        if self._staging is None:
            raise KVError("the staging memory is not attached")
        return self._staging

    @contextmanager
    def _copying(self, doing: str) -> Iterator[None]:
        """Queues what its block does on our stream, and waits for it: also for what was queued before an error."""
        with self._errors(doing), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._wait()

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Raises KVError for CUDA's errors, which torch raises as RuntimeError."""
        try:
            yield
        except RuntimeError as error:
            raise KVError(f"{doing} failed on {self._device}: {error}") from error


def _blocks(rows: torch.Tensor, run: CopyRun) -> torch.Tensor:
    return rows[run.block_id : run.block_id + run.count]


def _slots(staging: torch.Tensor, run: CopyRun) -> torch.Tensor:
    return staging[run.slot : run.slot + run.count]


def _uuid(device: torch.device | int) -> bytes:
    return UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes


def _device_with(uuid: bytes) -> int | None:
    """Returns the index of a GPU among those that this process sees, None if it is not among them."""
    return next((index for index in range(torch.cuda.device_count()) if _uuid(index) == uuid), None)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
