"""A pool in device memory, shared by the connectors that serve it directly: one thread talks to the device.

Invariant: no block counts as received without a digest that was computed on the device.
"""

import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from kv_connector.device.memory import DeviceBuffer, DirectMemory
from kv_connector.geometry import Geometry
from kv_connector.header import BlockHeader
from kv_connector.worker import Worker
from kvrelay.core.errors import KVError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock

_logger = logging.getLogger(__name__)

# Half a millisecond of copying and digesting on a GPU. A third of a millisecond of that is the digests' chain, however
# few blocks there are.
_SLICE_BYTES = 256 << 20

P = ParamSpec("P")
T = TypeVar("T")


class DevicePool:
    """Implements Payloads over `memory`, whose blocks have `layout`. Used on the node's loop; everything that waits for
    the device runs on one thread, in the order of the calls. Its maker stops it after its connectors are closed, or a
    TieredConnector that serves it does."""

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

    async def describe_all(self, blocks: Sequence[NamedBlock], epoch: int) -> list[BlockHeader]:
        digests = await self.digests([block.block_id for block in blocks]) if blocks else []
        return [self.geometry.header(block, epoch, digest) for block, digest in zip(blocks, digests, strict=True)]

    async def quiesce(self) -> None:
        """Logs an error of the device: one that fails writes nothing any more."""
        try:
            await self.run(self.memory.quiesce)
        except KVError as error:
            _logger.warning("after a connection was cut: %s", error)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function on the device's thread; `Worker.run` says what a cancelled caller waits for."""
        return await self._worker.run(function, *args, **kwargs)

    def release(self) -> None:
        """Does nothing: the memory belongs to its maker."""

    def stop(self) -> None:
        """Ends the thread."""
        self._worker.stop()
