"""A KV pool in CUDA memory, copied block by block through pinned host memory on a stream of its own.

Needs a card: nothing without one calls it, and what it copies is checked at start-up (`self_test.py`).
Invariant: nothing here ever waits on, or is queued behind, the engine's stream from the host; the order between the two
streams is made of events on the device.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from kv_connector.base import PoolBuffer
from kv_connector.device_memory import BlockCopy
from kvrelay.core.errors import KVError

_logger = logging.getLogger(__name__)


class CudaMemory:
    """Implements DeviceMemory over `pool`, `[num_blocks, ...]`, contiguous. `engine_stream`: where the engine's steps
    are queued."""

    def __init__(self, pool: torch.Tensor, engine_stream: torch.cuda.Stream) -> None:
        assert pool.is_cuda and pool.is_contiguous()
        self.num_blocks = pool.shape[0]
        self._rows = pool.view(torch.uint8).view(self.num_blocks, -1)  # [num_blocks, block_bytes]
        self._device = pool.device
        self._engine_stream = engine_stream
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._staging: torch.Tensor | None = None  # [num_slots, block_bytes] in host memory
        self._pinned = False

    def attach(self, staging: PoolBuffer) -> None:
        host = torch.frombuffer(staging.memory, dtype=torch.uint8)
        with self._errors("pinning"):
            # Zero is success. 1: portable, that is, pinned for every context of this process.
            failure = int(_runtime().cudaHostRegister(host.data_ptr(), host.numel(), 1))
        self._pinned = failure == 0
        if not self._pinned:
            self._forget_last_error()
            _logger.warning(
                "%d MiB of staging memory can not be pinned (CUDA error %d): KV moves slowly. Allow this process to "
                "lock memory (ulimit -l, docker: --ulimit memlock=-1), or lower --kv-staging-gib",
                host.numel() >> 20, failure,
            )  # fmt: skip
        self._staging = host.view(staging.num_blocks, -1)

    def to_host(self, copies: Sequence[BlockCopy]) -> None:
        staging = self._require_staging()
        with self._errors("copying to the host"), torch.cuda.stream(self._stream):
            for copy in copies:
                staging[copy.slot].copy_(self._rows[copy.block_id], non_blocking=True)
            self._wait()

    def from_host(self, copies: Sequence[BlockCopy]) -> None:
        staging = self._require_staging()
        with self._errors("copying from the host"), torch.cuda.stream(self._stream):
            self._stream.wait_stream(self._engine_stream)
            for copy in copies:
                self._rows[copy.block_id].copy_(staging[copy.slot], non_blocking=True)
            self._wait()

    def detach(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None and self._pinned:
            with self._errors("unpinning"):
                _runtime().cudaHostUnregister(staging.data_ptr())

    def _wait(self) -> None:
        """For what was queued on our stream until now; the thread sleeps, and others run."""
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(self._stream)
        end.synchronize()

    def _forget_last_error(self) -> None:
        """CUDA reports a failed call once more, to whoever looks next; that is to be us and not the engine."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)

    def _require_staging(self) -> torch.Tensor:
        if self._staging is None:
            raise KVError("the staging memory is not attached")
        return self._staging

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """CUDA's errors as ours; torch raises them as RuntimeError."""
        try:
            yield
        except RuntimeError as error:
            raise KVError(f"{doing} failed on {self._device}: {error}") from error


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
