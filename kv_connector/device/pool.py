"""A pool in device memory as the connectors that serve it directly share it: one thread talks to the device.

Invariant: what is on the device is never called good without a digest that was computed there.
"""

import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

from kv_connector.base import Block, KVConnector
from kv_connector.device.memory import DeviceBuffer, DirectMemory
from kv_connector.geometry import Geometry
from kv_connector.header import BlockHeader
from kv_connector.worker import Worker
from kvrelay.core.errors import KVError
from kvrelay.core.kv_layout import KVLayout

_logger = logging.getLogger(__name__)

_SLICE_BYTES = 64 << 20  # a fraction of a millisecond of reading or copying on a card

P = ParamSpec("P")
T = TypeVar("T")


class DevicePool:
    """Implements Payloads over `memory`, whose blocks have `layout`. Used on the node's loop; what it waits for runs on
    a thread of its own, in the order given. Stopped after its connectors are closed, by whoever made it or by a
    TieredConnector that serves it."""

    def __init__(self, memory: DirectMemory, layout: KVLayout) -> None:
        self.memory = memory
        self.layout = layout
        self.num_blocks = memory.num_blocks
        self.block_bytes = layout.block_bytes
        self.geometry = Geometry.of(layout)
        self.slice_bytes = _SLICE_BYTES
        self._worker = Worker("kv-device")

    def payload(self, block_id: int) -> DeviceBuffer:
        return self.memory.buffer(block_id)

    def digest_on_arrival(self, block_id: int) -> bytes | None:
        return None

    async def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        return await self.run(self.memory.digests, block_ids)

    async def describe_all(self, blocks: Sequence[Block], epoch: int) -> list[BlockHeader]:
        digests = await self.digests([block.block_id for block in blocks]) if blocks else []
        return [self.geometry.header(block, epoch, digest) for block, digest in zip(blocks, digests, strict=True)]

    async def quiesce(self) -> None:
        """A device that reports an error instead does nothing any more."""
        try:
            await self.run(self.memory.quiesce)
        except KVError as error:
            _logger.warning("after a connection was cut: %s", error)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """On the device's thread; `Worker.run` says what a cancelled caller waits for."""
        return await self._worker.run(function, *args, **kwargs)

    def release(self) -> None:
        """The memory is its maker's."""

    def stop(self) -> None:
        """Ends the thread."""
        self._worker.stop()


class DeviceConnector(KVConnector, Protocol):
    """A backend that moves blocks of a pool on a device without the host. `serve` first, exactly once."""

    def serve(self, pool: DevicePool, *, node_id: str, epoch: int) -> None:
        """Serves from the pool, which outlives this connector. Raises ConfigurationError or KVError when that does not
        work here."""
        ...
