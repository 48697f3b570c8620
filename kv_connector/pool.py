"""The local pool, as a transport sees it and as rows of bytes; the one way a payload is copied between host pools."""

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv_connector.base import Block, PoolBuffer
from kv_connector.geometry import Geometry
from kv_connector.header import BlockHeader, payload_digest
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv_layout import KVLayout

Rows = NDArray[np.uint8]
T = TypeVar("T")
CopyPayload = Callable[[Rows, Rows], bytes]
CopyRows = Callable[[Rows, Sequence[int], Rows, Sequence[int]], Sequence[bytes]]
"""Copies rows of the second `[num_blocks, block_bytes]` into rows of the first; the digest of each as it was stored."""

_SLICE_BYTES = 1 << 20  # digested on the loop, which gets a turn after each
_COPY_CHUNK_BYTES = 256 << 10  # small enough to be read again from cache by the digest


class Payloads(Protocol):
    """A pool whose blocks a transport sends and receives in place, wherever its memory is. Used on the node's loop."""

    num_blocks: int
    block_bytes: int
    geometry: Geometry
    slice_bytes: int  # digested at a time, so that nobody else waits for long

    def payload(self, block_id: int) -> object:
        """The block as UCX takes it: it exposes its memory, on the host or on a device."""
        ...

    def digest_on_arrival(self, block_id: int) -> bytes | None:
        """The digest of a block of which the last bytes have just come, while they may be in the cache. None where it
        cannot be had at once: ask `digests`."""
        ...

    async def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        """Of blocks that nothing writes to."""
        ...

    async def describe_all(self, blocks: Sequence[Block], epoch: int) -> list[BlockHeader]:
        """The headers of blocks as their content is now; reads all of it."""
        ...

    async def quiesce(self) -> None:
        """Returns when nothing that a transport has begun in this process touches the pool. After one was cut off."""
        ...

    def release(self) -> None:
        """After the last call."""
        ...


class LocalPool:
    """Implements Payloads. A pool's memory as `rows`, `[num_blocks, block_bytes]`, writable. Owns the mapping, if it
    was given one."""

    def __init__(self, buffer: PoolBuffer, mapping: mmap.mmap | None) -> None:
        self.buffer = buffer
        self.num_blocks = buffer.num_blocks
        self.block_bytes = buffer.layout.block_bytes
        self.rows: Rows = np.frombuffer(buffer.memory, np.uint8).reshape(buffer.num_blocks, self.block_bytes)
        self.geometry = Geometry.of(buffer.layout)
        self.slice_bytes = _SLICE_BYTES
        self._mapping = mapping

    @classmethod
    def inside(cls, mapping: mmap.mmap, offset: int, layout: KVLayout, num_blocks: int) -> "LocalPool":
        """The part of a mapping from `offset` on; the pool owns all of it."""
        memory = memoryview(mapping)[offset : offset + num_blocks * layout.block_bytes]
        return cls(PoolBuffer(memory, layout, num_blocks), mapping)

    @classmethod
    def over(cls, buffer: PoolBuffer) -> "LocalPool":
        """Memory that belongs to another connector."""
        return cls(buffer, None)

    @classmethod
    def anonymous(cls, layout: KVLayout, num_blocks: int) -> "LocalPool":
        """Private zeroed memory, in huge pages where there are some. Raises ConfigurationError when the system refuses
        it."""
        size = num_blocks * layout.block_bytes
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise ConfigurationError(
                f"no memory for a KV pool of {num_blocks} blocks ({size} bytes): {error}; ask for fewer blocks"
            ) from error
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)  # the system copies to and from sockets page by page
        return cls.inside(mapping, 0, layout, num_blocks)

    def describe(self, block: Block, epoch: int) -> BlockHeader:
        """The header of a block as its content is now; reads all of it."""
        return self.geometry.header(block, epoch, payload_digest(self.rows[block.block_id].data))

    def payload(self, block_id: int) -> object:
        return self.rows[block_id]

    def digest_on_arrival(self, block_id: int) -> bytes | None:
        return payload_digest(self.rows[block_id].data)

    async def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        return [payload_digest(self.rows[block_id].data) for block_id in block_ids]

    async def describe_all(self, blocks: Sequence[Block], epoch: int) -> list[BlockHeader]:
        return [self.describe(block, epoch) for block in blocks]

    async def quiesce(self) -> None:
        """What UCX does with host memory ends with its request."""

    def release(self) -> None:
        """Unmaps the memory, or leaves that to the last tensor that still looks at it: never under a live view."""
        self.rows = np.empty((0, 0), np.uint8)
        if self._mapping is None:
            return
        with suppress(BufferError):
            self.buffer.memory.release()
            self._mapping.close()


@dataclass(frozen=True, slots=True)
class Slices(Generic[T]):
    """Blocks (or what stands for one each) in runs of about `slice_bytes`, so that no run holds a thread or the loop
    for long."""

    blocks: Sequence[T]
    block_bytes: int
    slice_bytes: int

    def __iter__(self) -> Iterator[Sequence[T]]:
        count = max(1, self.slice_bytes // self.block_bytes)
        for start in range(0, len(self.blocks), count):
            yield self.blocks[start : start + count]


def copy_payload(destination: Rows, source: Rows) -> bytes:
    """Copies one block (both `[block_bytes]`) and returns the digest of what arrived, not of what was sent."""
    if destination.size <= _COPY_CHUNK_BYTES:
        np.copyto(destination, source)
        return payload_digest(destination.data)
    digest = xxhash.xxh3_128()
    for start in range(0, destination.size, _COPY_CHUNK_BYTES):
        chunk = destination[start : start + _COPY_CHUNK_BYTES]
        np.copyto(chunk, source[start : start + _COPY_CHUNK_BYTES])
        digest.update(chunk.data)
    return digest.digest()


def copy_rows(target: Rows, target_rows: Sequence[int], source: Rows, source_rows: Sequence[int]) -> list[bytes]:
    """A `CopyRows` for everywhere."""
    return [copy_payload(target[to], source[row]) for to, row in zip(target_rows, source_rows, strict=True)]
