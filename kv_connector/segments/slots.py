"""The slots of a segment: one per block, with its header, written by the owner while others read.

    0       8     sequence counter (uint64)
    8       96    block header (header.py)
    104     24    zeros

A slot's counter is odd while its header changes, and has another value afterwards: a reader that sees the same even
value before and after its copy has a header that was valid throughout (Linux calls this a seqlock). The counter is the
cheap check; what makes a copy trustworthy, also on processors with a weak memory order, is the digest of the copied
bytes.

All blocks of a call go through a few array operations together, because a node's engine waits for the interpreter
meanwhile.
"""

import mmap
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_connector.base import FetchOutcome
from kv_connector.geometry import Geometry
from kv_connector.header import DIGEST_OFFSET, HASH_OFFSET, HEADER_BYTES, BlockHeader, Mismatch
from kv_connector.verdict import Verdict
from kvrelay.core.block_hash import HASH_BYTES, BlockHash
from kvrelay.core.named_block import NamedBlock

SLOT_BYTES = 128

_SLOT = np.dtype(
    {
        "names": ["sequence", "header", "name", "name_prefix"],
        "formats": ["<u8", (np.uint8, HEADER_BYTES), (np.uint8, HASH_BYTES), "<u8"],
        "offsets": [0, 8, 8 + HASH_OFFSET, 8 + HASH_OFFSET],
        "itemsize": SLOT_BYTES,
    }
)


class OwnedSlots:
    """The slots as their owner has them. `absent` and `fill` may be called from another thread than `clear`."""

    def __init__(self, mapping: mmap.mmap, num_blocks: int, *, offset: int) -> None:
        self._slots = np.frombuffer(mapping, _SLOT, num_blocks, offset)
        self._lock = threading.Lock()  # held for a few stores, never for a copy or a digest

    def absent(self, blocks: Sequence[NamedBlock]) -> list[tuple[NamedBlock, int]]:
        """Returns the blocks that their slots do not have yet, each with its slot's counter. Call this before the
        payloads are digested."""
        ids = _ids([block.block_id for block in blocks])
        # Without the lock, since the engine would wait for it while this thread waits for the interpreter. A slot that
        # changes meanwhile has another counter when `fill` compares it.
        counters = self._slots["sequence"][ids].tolist()
        headers = _headers(self._slots, ids)
        return [
            (block, counter)
            for block, counter, header in zip(blocks, counters, map(BlockHeader.decode, headers), strict=True)
            if (header.block_hash, header.num_tokens) != (block.block_hash, block.num_tokens)
        ]

    def fill(self, absent: Sequence[tuple[NamedBlock, int]], headers: Sequence[BlockHeader]) -> int:
        """Writes headers into slots; returns how many slots that were. Of two blocks for one slot the last one counts.
        A slot that was cleared since its counter was read stays empty, because the digested content is gone."""
        if not absent:
            return 0
        ids = _ids([block.block_id for block, _ in absent])
        expected = np.array([counter for _, counter in absent], np.uint64)
        encoded = np.frombuffer(b"".join(header.encode() for header in headers), np.uint8).reshape(-1, HEADER_BYTES)
        with self._lock:
            held = self._slots["sequence"][ids] == expected
            self._change(ids[held], encoded[held])
        return len(set(ids[held].tolist()))

    def clear(self, block_ids: Sequence[int]) -> None:
        """Empties slots. Takes microseconds."""
        with self._lock:
            if len(self._slots):
                self._change(_ids(block_ids), 0)

    def release(self) -> None:
        """Drops the view of the mapping, so that it can be closed. Waits for a `clear` under way; later ones have no
        effect."""
        with self._lock:
            self._slots = np.empty(0, _SLOT)

    def _change(self, ids: NDArray[np.intp], headers: NDArray[np.uint8] | int) -> None:
        self._slots["sequence"][ids] += 1
        self._slots["header"][ids] = headers
        self._slots["sequence"][ids] += 1


class SlotSnapshot(NamedTuple):
    """A slot before its block is copied: its counter, and the digest that the copy must have."""

    slot: int
    counter: int
    payload_digest: bytes


class PeerSlots:
    """The slots of another node. Used by one thread."""

    def __init__(self, mapping: mmap.mmap, geometry: Geometry, num_blocks: int, *, offset: int) -> None:
        self._slots = np.frombuffer(mapping, _SLOT, num_blocks, offset)
        self._geometry = geometry

    def find(self, names: Sequence[BlockHash]) -> dict[BlockHash, list[int]]:
        """Returns the slots that have these names now, and maybe others: compares the first 8 bytes."""
        wanted: NDArray[np.uint64] = np.unique(np.frombuffer(b"".join(names), "<u8")[:: HASH_BYTES // 8])
        held = np.ascontiguousarray(self._slots["name_prefix"])
        nearest = np.minimum(np.searchsorted(wanted, held), len(wanted) - 1)
        hits = np.flatnonzero(wanted[nearest] == held)
        found: dict[BlockHash, list[int]] = {}
        for slot, name in zip(hits.tolist(), _as_bytes(self._slots["name"][hits]), strict=True):
            found.setdefault(BlockHash(name), []).append(slot)
        return found

    def take_snapshots(
        self, slots: Sequence[int], blocks: Sequence[NamedBlock], *, epoch: int
    ) -> list[SlotSnapshot | Verdict]:
        """Returns one snapshot per slot, or a verdict where a copy would be useless."""
        ids = _ids(slots)
        before = self._slots["sequence"][ids]
        headers = _headers(self._slots, ids)
        steady = (self._slots["sequence"][ids] == before) & (before % 2 == 0)
        right = self._geometry.headers_before_digest(blocks, epoch)
        return [
            SlotSnapshot(slot, counter, header[DIGEST_OFFSET:])
            if is_steady and header.startswith(beginning)
            else self._refusal(header, block, epoch, is_steady=is_steady)
            for slot, counter, header, block, beginning, is_steady in zip(
                slots, before.tolist(), headers, blocks, right, steady.tolist(), strict=True
            )
        ]

    def judge(self, snapshots: Sequence[SlotSnapshot], digests: Sequence[bytes]) -> list[Verdict]:
        """Returns the verdicts on copies that were made after `snapshots`, given the digests of what arrived."""
        counters = self._slots["sequence"][_ids([snapshot.slot for snapshot in snapshots])].tolist()
        return [_judged(*copied) for copied in zip(snapshots, counters, digests, strict=True)]

    def release(self) -> None:
        """Drops the view of the mapping."""
        self._slots = np.empty(0, _SLOT)

    def _refusal(self, header: bytes, block: NamedBlock, epoch: int, *, is_steady: bool) -> Verdict:
        """Returns why a copy would be useless for a slot whose header is not that of the block."""
        decoded = BlockHeader.decode(header)
        if not is_steady or decoded.block_hash != block.block_hash:
            return FetchOutcome.MISSING  # retracted or replaced since it was found
        return self._geometry.verify(decoded, block, epoch=epoch) or Mismatch.VERSION  # zeros that are none


def _judged(snapshot: SlotSnapshot, counter: int, digest: bytes) -> Verdict:
    if counter != snapshot.counter:
        return FetchOutcome.MISSING  # retracted during the copy, which may be anything, without anybody's fault
    return FetchOutcome.FETCHED if digest == snapshot.payload_digest else Mismatch.DIGEST


def _ids(values: Sequence[int]) -> NDArray[np.intp]:
    return np.asarray(values, np.intp)


def _headers(slots: NDArray[np.void], ids: NDArray[np.intp]) -> list[bytes]:
    """Returns the encoded headers."""
    return _as_bytes(slots["header"][ids])


def _as_bytes(array: NDArray[np.uint8]) -> list[bytes]:
    """Returns each row of `[num_rows, row_bytes]`."""
    data, size = array.tobytes(), array.shape[1]
    return [data[start : start + size] for start in range(0, len(data), size)]
