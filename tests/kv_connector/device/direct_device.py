"""A substitute for a GPU that transports reach directly: host memory that other processes can map by a handle.

It has no streams, no CUDA handles and no kernels, but it checks who touches the memory when, and from which thread.
"""

import asyncio
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kv_connector.device.memory import BlockCopy, DeviceBuffer
from kv_connector.header import payload_digest
from kv_connector.pool import Rows
from kvrelay.core.errors import KVError
from tests.kv_connector.device.slow_device import SlowDevice


class Exposed:
    """A row with the interface of device memory. UCX detects by itself that it is host memory."""

    def __init__(self, row: Rows) -> None:
        self.row = row

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": self.row.shape, "typestr": "|u1", "data": (self.row.ctypes.data, False), "version": 3}


class MappedDevice:
    """Implements PeerMemory."""

    def __init__(self, memory: mmap.mmap, block_bytes: int) -> None:
        self.rows: Rows = np.frombuffer(memory, np.uint8).reshape(-1, block_bytes)
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.rows = np.empty((0, 0), np.uint8)


class DirectDevice(SlowDevice):
    """Implements DirectMemory. While `gate` is closed no copy and no digest ends. `unmappable`: peers'
    handles cannot be opened."""

    kind = "host"

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        super().__init__(num_blocks, block_bytes)
        self._file = os.memfd_create("kvrelay-test-device")
        os.ftruncate(self._file, num_blocks * block_bytes)
        self.mapping = mmap.mmap(self._file, num_blocks * block_bytes)
        self.memory = memoryview(self.mapping)
        self.rows: Rows = np.frombuffer(self.mapping, np.uint8).reshape(num_blocks, block_bytes)
        self.unmappable = False
        self.opened: list[MappedDevice] = []
        self.num_copied = 0
        self.num_digested = 0
        self.num_quiesced = 0

    def __del__(self) -> None:
        os.close(self._file)

    def buffer(self, block_id: int) -> DeviceBuffer:
        return Exposed(self.rows[block_id])

    def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        with self._busy():
            self.waiting.set()
            assert self.gate.wait(timeout=10.0)
            self.num_digested += len(block_ids)
            return [payload_digest(self.rows[block_id].data) for block_id in block_ids]

    def quiesce(self) -> None:
        with self._busy():
            self.num_quiesced += 1

    def export(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._file}".encode()

    def open(self, handle: bytes, num_blocks: int) -> MappedDevice:
        with self._busy():
            if self.unmappable:
                raise KVError("no way from here to there")
            try:
                with Path(handle.decode()).open("r+b") as file:
                    peer = MappedDevice(mmap.mmap(file.fileno(), num_blocks * self._block_bytes), self._block_bytes)
            except (OSError, ValueError) as error:
                raise KVError(f"not a handle: {error}") from error
            self.opened.append(peer)
            return peer

    def copy_from(self, peer: object, copies: Sequence[BlockCopy]) -> None:
        assert isinstance(peer, MappedDevice) and not peer.closed
        with self._busy():
            for copy in copies:
                self.rows[copy.block_id] = 0xEE
            self.waiting.set()
            assert self.gate.wait(timeout=10.0)
            for copy in copies:
                self.rows[copy.block_id] = peer.rows[copy.slot]
            self.num_copied += len(copies)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        assert self.starting or asyncio._get_running_loop() is None, "never on the loop"
        assert self._in_use.acquire(blocking=False), "one call at a time"
        try:
            if self.broken:
                raise KVError("the device is gone")
            yield
        finally:
            self._in_use.release()
