"""A substitute for a GPU: memory that connectors only reach by copies, which take effect late and in order."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from kv_connector.base import PoolBuffer
from kv_connector.device.memory import BlockCopy
from kvrelay.core.errors import KVError


class SlowDevice:
    """Implements DeviceMemory; tests read `memory`. A copy first overwrites its destination with garbage, for whoever
    reads before it has ended. While `gate` is closed no copy ends. `broken`: every copy fails. `starting`: the node
    does not serve yet, and copies may block its loop."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.memory = memoryview(bytearray(num_blocks * block_bytes))
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()  # a copy has come to the gate
        self.broken = False
        self.starting = False
        self.num_to_host = 0
        self.num_from_host = 0
        self._block_bytes = block_bytes
        self._staging: memoryview | None = None
        self._in_use = threading.Lock()

    def attach(self, staging: PoolBuffer) -> None:
        assert self._staging is None and staging.layout.block_bytes == self._block_bytes
        self._staging = staging.memory[:]

    def to_host(self, copies: Sequence[BlockCopy]) -> None:
        self.num_to_host += len(copies)
        assert self._staging is not None, "attached"
        staging = self._staging
        self._copy(copies, lambda copy: (staging, copy.slot, self.memory, copy.block_id))

    def from_host(self, copies: Sequence[BlockCopy]) -> None:
        self.num_from_host += len(copies)
        assert self._staging is not None, "attached"
        staging = self._staging
        self._copy(copies, lambda copy: (self.memory, copy.block_id, staging, copy.slot))

    def detach(self) -> None:
        assert self._in_use.acquire(blocking=False), "one call at a time"
        if self._staging is not None:
            self._staging.release()
            self._staging = None
        self._in_use.release()

    def _copy(
        self, copies: Sequence[BlockCopy], ends: Callable[[BlockCopy], tuple[memoryview, int, memoryview, int]]
    ) -> None:
        assert self.starting or asyncio._get_running_loop() is None, "never on the loop"
        assert self._in_use.acquire(blocking=False), "one call at a time"
        try:
            for copy in copies:
                to, index, _, _ = ends(copy)
                to[index * self._block_bytes : (index + 1) * self._block_bytes] = b"\xee" * self._block_bytes
            self.waiting.set()
            assert self.gate.wait(timeout=10.0)
            if self.broken:
                raise KVError("the device is gone")
            for copy in copies:
                to, to_index, source, index = ends(copy)
                content = source[index * self._block_bytes : (index + 1) * self._block_bytes]
                to[to_index * self._block_bytes : (to_index + 1) * self._block_bytes] = content
        finally:
            self._in_use.release()
