"""The seam of a pool whose blocks a transport sends and receives in place, on the host or on a device."""

from collections.abc import Sequence
from typing import Protocol

from kv_connector.geometry import Geometry
from kv_connector.header import BlockHeader
from kvrelay.core.kv.named_block import NamedBlock


class Payloads(Protocol):
    """A pool as a transport sees it. Used on the node's loop."""

    num_blocks: int
    block_bytes: int
    geometry: Geometry
    slice_bytes: int  # digested at a time, so that nobody else waits for long

    def payload(self, block_id: int) -> object:
        """Returns the block in a form that UCX accepts: an object that exposes its memory."""
        ...

    def digest_on_arrival(self, block_id: int) -> bytes | None:
        """Returns the digest of a block whose last bytes have just arrived, while they may still be in the cache, or
        None where it cannot be had at once; `digests` returns it then."""
        ...

    async def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns the digests of blocks that nothing writes to."""
        ...

    async def describe_all(self, blocks: Sequence[NamedBlock], epoch: int) -> list[BlockHeader]:
        """Returns the headers of blocks with their present content, all of which it reads."""
        ...

    async def quiesce(self) -> None:
        """Returns when nothing that a transport has started in this process touches the pool. Called after a connection
        was cut."""
        ...

    def release(self) -> None:
        """Gives up the memory, if it belongs to the pool. The last call."""
        ...
