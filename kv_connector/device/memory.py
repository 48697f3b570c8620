"""The seams of a pool in device memory: copied to host memory and back, or read and written where it is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_connector.base import PoolBuffer


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block `block_id` of the pool and block `slot` of the staging memory, or of a peer's pool. The method that gets it
    says which is copied to which."""

    block_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class CopyRun:
    """`count` copies of consecutive blocks to or from consecutive slots: one range of bytes at each end."""

    block_id: int
    slot: int
    count: int


def copy_runs(copies: Iterable[BlockCopy]) -> list[CopyRun]:
    """Joins copies to as few runs as there are, in any order. Queueing a copy costs the host as much as the GPU needs
    for megabytes, and a pool gives out its blocks in order until it is full."""
    runs: list[CopyRun] = []
    for copy in sorted(copies, key=lambda copy: copy.block_id):
        if runs:
            last = runs[-1]
            if (copy.block_id, copy.slot) == (last.block_id + last.count, last.slot + last.count):
                runs[-1] = CopyRun(last.block_id, last.slot, last.count + 1)
                continue
        runs.append(CopyRun(copy.block_id, copy.slot, 1))
    return runs


class DeviceMemory(Protocol):
    """A pool of `num_blocks` blocks on a device. Its maker owns the memory and keeps it until after the last call.

    Every method may be called from any thread, but from one at a time. They wait for the device, without a deadline: a
    copy writes until it has ended, and its blocks must stay reserved until then. They raise KVError when the device
    reports an error."""

    num_blocks: int

    def attach(self, staging: PoolBuffer) -> None:
        """Sets the host memory that blocks are copied to and from. Called once, before any copy; the memory stays valid
        until `detach`."""
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
        """Stops using the staging memory. Idempotent."""
        ...


class DeviceBuffer(Protocol):
    """One block's memory, in the form in which Python libraries exchange device memory."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...


class PeerMemory(Protocol):
    """A peer's pool, mapped into this process. It is only read."""

    def close(self) -> None:
        """Unmaps the pool. Idempotent; logs errors instead of raising them."""
        ...


class DirectMemory(DeviceMemory, Protocol):
    """A pool on a device that transports read and write themselves. The rules of DeviceMemory hold, except that these
    methods work without `attach`.

    `kind`: "cuda", or "host" for a substitute in tests. A transport that does not know the kind would take an address
    on the device for one on the host."""

    kind: str

    def buffer(self, block_id: int) -> DeviceBuffer:
        """Returns the block for a transport that detects by itself what kind of memory it is. Waits for nothing; may be
        called from any thread, at any time."""
        ...

    def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns the `header.payload_digest` of each block, computed on the device. The blocks are complete."""
        ...

    def quiesce(self) -> None:
        """Returns when the device has finished all work of this process, through whichever library it was queued."""
        ...

    def export(self) -> bytes:
        """Returns the handle with which other processes of this host map the pool: at most `MAX_HANDLE_BYTES` of
        `segments/segment.py`, to be kept from everybody else. The pool is neither moved nor freed before all have
        closed it or this process ends."""
        ...

    def open(self, handle: bytes, num_blocks: int) -> PeerMemory:
        """Maps a pool by its handle, a peer's or our own. Checks that it has room for `num_blocks` blocks of our size.
        Raises KVError when it cannot be mapped."""
        ...

    def copy_from(self, peer: PeerMemory, copies: Sequence[BlockCopy]) -> None:
        """Copies from the peer's blocks (`slot`) into ours, under the rules of `from_host`. The peer may change them
        meanwhile: what has arrived is to be verified."""
        ...
