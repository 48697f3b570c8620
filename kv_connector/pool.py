"""A pool in host memory as rows of bytes, and how payloads are copied between such pools."""

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv_connector.base import PoolBuffer
from kv_connector.geometry import Geometry
from kv_connector.header import BlockHeader, payload_digest
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.process.private_memory import map_private_memory

Rows = NDArray[np.uint8]
T = TypeVar("T")
CopyPayload = Callable[[Rows, Rows], bytes]
CopyRows = Callable[[Rows, Sequence[int], Rows, Sequence[int]], Sequence[bytes]]
"""Copies rows between two arrays `[num_blocks, block_bytes]`: (target, its rows, source, its rows). Returns the digest
of each row as it was stored."""

_SLICE_BYTES = 1 << 20  # digested on the loop, which runs others after each
_COPY_CHUNK_BYTES = 256 << 10  # small enough to be read again from cache by the digest


class LocalPool:
    """Implements Payloads over a buffer, with its memory as writable `rows`, `[num_blocks, block_bytes]`. Owns
    `mapping`, if there is one."""

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
        """Returns a pool in a mapping, from `offset` on, that owns all of the mapping."""
        memory = memoryview(mapping)[offset : offset + num_blocks * layout.block_bytes]
        return cls(PoolBuffer(memory, layout, num_blocks), mapping)

    @classmethod
    def over(cls, buffer: PoolBuffer | None, layout: KVLayout, num_blocks: int) -> "LocalPool":
        """Returns a pool over another connector's `buffer`, or an `anonymous` one where there is none."""
        return cls.anonymous(layout, num_blocks) if buffer is None else cls(buffer, None)

    @classmethod
    def anonymous(cls, layout: KVLayout, num_blocks: int) -> "LocalPool":
        """Returns a pool in private zeroed memory, in huge pages where possible. Raises ConfigurationError when the
        system refuses it."""
        mapping = map_private_memory(layout, num_blocks)
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)  # the system copies to and from sockets page by page
        return cls.inside(mapping, 0, layout, num_blocks)

    def describe(self, block: NamedBlock, epoch: int) -> BlockHeader:
        """Returns the header of a block with its present content, all of which it reads."""
        return self.geometry.header(block, epoch, self.digest(block.block_id))

    def digest(self, block_id: int) -> bytes:
        """Returns the digest of a block's present content, all of which it reads."""
        return payload_digest(self.rows[block_id].data)

    def payload(self, block_id: int) -> object:
        return self.rows[block_id]

    def digest_on_arrival(self, block_id: int) -> bytes | None:
        return self.digest(block_id)

    async def digests(self, block_ids: Sequence[int]) -> list[bytes]:
        return [self.digest(block_id) for block_id in block_ids]

    async def describe_all(self, blocks: Sequence[NamedBlock], epoch: int) -> list[BlockHeader]:
        return [self.describe(block, epoch) for block in blocks]

    async def quiesce(self) -> None:
        """Does nothing: UCX touches host memory only until its request has ended."""

    def release(self) -> None:
        """Unmaps the memory, or leaves that to the last tensor that still has a view of it."""
        self.rows = np.empty((0, 0), np.uint8)
        if self._mapping is None:
            return
        with suppress(BufferError):
            self.buffer.memory.release()
            self._mapping.close()


def slices(blocks: Sequence[T], block_bytes: int, slice_bytes: int) -> Iterator[Sequence[T]]:
    """Yields blocks, or one object for each, in runs of about `slice_bytes`, so that no run holds a thread or the loop
    for long."""
    count = max(1, slice_bytes // block_bytes)
    for start in range(0, len(blocks), count):
        yield blocks[start : start + count]


def copy_payload(destination: Rows, source: Rows) -> bytes:
    """Copies one block (both `[block_bytes]`); returns the digest of the destination, not of the source."""
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
    """Implements `CopyRows` on any machine."""
    return [copy_payload(target[to], source[row]) for to, row in zip(target_rows, source_rows, strict=True)]
