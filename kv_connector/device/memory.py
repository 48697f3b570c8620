"""The seams of a pool that the host cannot look into: copied to host memory and back, or reached where it lies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_connector.base import PoolBuffer

MAX_HANDLE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block `block_id` of the pool and block `slot` of the staging memory, or of a peer's pool; which way is the
    method's to say."""

    block_id: int
    slot: int


class DeviceMemory(Protocol):
    """A pool of `num_blocks` blocks on a device. Whoever made it owns it; it outlives its last call here.

    Every method may be called from any thread, but from one at a time. They wait for the device, which has no deadline:
    a copy that was begun writes until it has ended, so its blocks stay taken until then. They raise KVError when the
    device reports an error."""

    num_blocks: int

    def attach(self, staging: PoolBuffer) -> None:
        """Once, first: host memory that copies lead to and come from. It stays valid until `detach`."""
        ...

    def to_host(self, copies: Sequence[BlockCopy]) -> None:
        """Copies from the pool into the staging. The blocks are complete: the step that wrote them has been collected.
        When this has returned, the host can read them. An error is raised only once no copy is under way any more."""
        ...

    def from_host(self, copies: Sequence[BlockCopy]) -> None:
        """Copies from the staging into the pool. No step that is queued on the device reads or writes these blocks.
        When this has returned, steps given to the device from now on see the blocks, and the staging can be written
        again. An error is raised only once no copy is under way any more."""
        ...

    def detach(self) -> None:
        """The staging memory is not used any more. Idempotent."""
        ...


class DeviceBuffer(Protocol):
    """One block's memory as libraries take it from one another."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...


class PeerMemory(Protocol):
    """A peer's pool, mapped into this process; to be read only."""

    def close(self) -> None:
        """Unmaps it. Idempotent; what goes wrong is logged."""
        ...


class DirectMemory(DeviceMemory, Protocol):
    """A pool on a device that transports read and write themselves. The rules of DeviceMemory; `attach` is not needed
    for what is here.

    `kind`: "cuda", or "host" for one that only stands for a device; a transport that does not know the kind would take
    an address on the device for one of the host."""

    kind: str

    def buffer(self, block_id: int) -> DeviceBuffer:
        """The block, for a transport that finds out by itself what kind of memory it is. At once, from any thread."""
        ...

    def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        """`header.payload_digest` of each block, computed where it lies. The blocks are complete."""
        ...

    def quiesce(self) -> None:
        """Returns when the device has done whatever this process has given to it, through whichever library."""
        ...

    def export(self) -> bytes:
        """What lets other processes of this host map the pool: at most `MAX_HANDLE_BYTES`, for their eyes only. The
        pool stays where it is until all have closed it, or this process ends."""
        ...

    def open(self, handle: bytes, num_blocks: int) -> PeerMemory:
        """Maps what a peer, or we, have exported: `num_blocks` blocks as large as ours, which is checked. Raises
        KVError when that is not possible here."""
        ...

    def copy_from(self, peer: PeerMemory, copies: Sequence[BlockCopy]) -> None:
        """Copies from the peer's blocks (`slot`) into ours, under the rules of `from_host`. The peer may change them
        meanwhile: what has arrived is to be verified."""
        ...
