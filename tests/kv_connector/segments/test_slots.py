"""The slots of a segment, as their owner writes them and as peers find them at each moment."""

import mmap
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kv_connector.base import FetchOutcome
from kv_connector.geometry import Geometry
from kv_connector.header import DIGEST_OFFSET, HASH_OFFSET, BlockHeader, Mismatch
from kv_connector.segments.slots import NO_SLOT, SLOT_BYTES, OwnedSlots, PeerSlots
from kv_connector.verdict import Verdict
from kvrelay.core.kv.block_hash import HASH_BYTES, BlockHash
from kvrelay.core.kv.named_block import NamedBlock
from tests.kv_connector.backends import EPOCH, LAYOUT, blocks

GEOMETRY = Geometry.of(LAYOUT)
NUM_SLOTS = 12
DIGEST = bytes(range(16))


class Sides:
    """The owner's and a peer's view of the same memory."""

    def __init__(self) -> None:
        self.mapping = mmap.mmap(-1, mmap.PAGESIZE)
        self.owned = OwnedSlots(self.mapping, NUM_SLOTS, offset=0)
        self.seen = PeerSlots(self.mapping, GEOMETRY, NUM_SLOTS, offset=0)

    def publish(self, *headers: tuple[NamedBlock, BlockHeader]) -> int:
        absent = self.owned.absent([block for block, _ in headers])
        wanted = dict(headers)
        return self.owned.fill(absent, [wanted[block] for block, _ in absent])

    def found(self, *names: BlockHash) -> list[list[int]]:
        """Returns the turns in which these names are found."""
        return [turn.tolist() for turn in self.seen.find(names)]

    def refusal(self, slot: int, block: NamedBlock) -> Verdict | None:
        """Returns why a slot's block would not be copied."""
        snapshots = self.seen.take_snapshots(np.array([slot]), [block], epoch=EPOCH)
        assert len(snapshots.refusals) + len(snapshots.places) == 1
        return snapshots.refusals.get(0)

    def close(self) -> None:
        self.owned.release()
        self.seen.release()
        self.mapping.close()


@pytest.fixture
def sides() -> Iterator[Sides]:
    both = Sides()
    yield both
    both.close()


def header(block: NamedBlock) -> BlockHeader:
    return GEOMETRY.header(block, EPOCH, DIGEST)


def test_a_block_with_more_tokens_is_absent_until_it_is_filled_again(sides: Sides) -> None:
    [partial] = blocks(1, tail=5)
    whole = replace(partial, num_tokens=16)
    assert sides.publish((partial, header(partial))) == 1
    assert not sides.owned.absent([partial])
    assert sides.publish((whole, header(whole))) == 1
    assert not sides.owned.absent([whole])
    assert sides.refusal(whole.block_id, partial) is Mismatch.TOKENS
    assert sides.refusal(whole.block_id, whole) is None


def test_finding_absent_blocks_takes_no_lock_that_the_engine_needs(sides: Sides) -> None:
    found: list[tuple[NamedBlock, int]] = []
    thread = threading.Thread(target=lambda: found.extend(sides.owned.absent(blocks(2))), daemon=True)
    with sides.owned._lock:  # as `clear` has it, on the engine's thread
        thread.start()
        thread.join(timeout=10)
    assert found == [(block, 0) for block in blocks(2)]


class Guarded(OwnedSlots):
    """Slots that change under their lock only."""

    def _change(self, ids: NDArray[np.intp], headers: NDArray[np.uint8] | int) -> None:
        assert self._lock.locked()
        super()._change(ids, headers)


def test_slots_are_filled_and_cleared_only_under_the_lock(sides: Sides) -> None:
    """The engine clears from its own thread, at any moment."""
    sides.owned = Guarded(sides.mapping, NUM_SLOTS, offset=0)
    [block] = blocks(1)
    assert sides.publish((block, header(block))) == 1
    sides.owned.clear([block.block_id])
    assert sides.found(block.block_hash) == []


def test_of_two_blocks_for_one_slot_the_last_one_is_there(sides: Sides) -> None:
    [partial] = blocks(1, tail=5)
    whole = replace(partial, num_tokens=16)
    assert sides.publish((partial, header(partial)), (whole, header(whole))) == 1
    assert not sides.owned.absent([whole])


def test_a_slot_that_is_being_written_is_missing(sides: Sides) -> None:
    [block] = blocks(1)
    sides.publish((block, header(block)))
    counters = np.frombuffer(sides.mapping, "<u8")[:: SLOT_BYTES // 8]
    counters[block.block_id] += 1
    assert sides.refusal(block.block_id, block) is FetchOutcome.MISSING
    counters[block.block_id] += 1
    assert sides.refusal(block.block_id, block) is None
    del counters


class Torn:
    """The slots as a peer sees them while the owner retracts `slot`: each read of the headers comes when the end of
    that one is gone, and its beginning is not. The counter has been changed `num_changes` times when it is read
    again."""

    def __init__(self, slots: NDArray[np.void], slot: int, num_changes: int) -> None:
        self._slots = slots
        self._slot = slot
        self._num_changes = num_changes

    def __getitem__(self, field: str) -> NDArray[np.generic]:
        if field == "header":
            self._slots["header"][self._slot, HASH_OFFSET + HASH_BYTES :] = 0
            self._slots["sequence"][self._slot] += self._num_changes
        return self._slots[field]


@pytest.mark.parametrize("num_changes", [1, 2])  # the owner is still at it; it has finished meanwhile
def test_a_slot_that_is_retracted_while_its_header_is_read_is_missing(sides: Sides, num_changes: int) -> None:
    """What was read may be half of a header, without anybody's fault."""
    chosen = blocks(2)
    sides.publish(*((block, header(block)) for block in chosen))
    slots = np.frombuffer(sides.mapping, sides.seen._slots.dtype, NUM_SLOTS).copy()
    sides.seen._slots = Torn(slots, 0, num_changes)  # type: ignore[assignment]  # it is read by field only
    snapshots = sides.seen.take_snapshots(np.arange(2), chosen, epoch=EPOCH)
    assert (snapshots.refusals, snapshots.places) == ({0: FetchOutcome.MISSING}, [1])


def test_a_slot_that_has_another_block_by_now_is_missing(sides: Sides) -> None:
    first, other = blocks(2)
    other = replace(other, block_id=first.block_id)
    sides.publish((first, header(first)))
    assert sides.found(first.block_hash) == [[first.block_id]]
    sides.publish((other, header(other)))
    assert sides.refusal(first.block_id, first) is FetchOutcome.MISSING
    assert sides.found(first.block_hash) == []


def test_of_many_slots_few_are_compared_with_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is ruled out by some bits of what it holds."""
    num_slots, compared = 20_000, 0
    searchsorted = np.searchsorted

    def counted(wanted: NDArray[np.uint64], held: NDArray[np.uint64]) -> NDArray[np.intp]:
        nonlocal compared
        compared += len(held)
        return searchsorted(wanted, held)

    slots = np.random.default_rng(1).integers(0, 256, (num_slots, SLOT_BYTES), np.uint8)
    names = [BlockHash(slots[slot, 8 + HASH_OFFSET :][:HASH_BYTES].tobytes()) for slot in (7, 19_999, 7, 300)]
    mapping = mmap.mmap(-1, slots.nbytes)
    mapping.write(slots.tobytes())
    seen = PeerSlots(mapping, GEOMETRY, num_slots, offset=0)
    monkeypatch.setattr(np, "searchsorted", counted)
    found = seen.find(names)
    seen.release()
    mapping.close()
    assert [turn.tolist() for turn in found] == [[7, 19_999, 7, 300]]
    assert compared < num_slots // 100


def test_a_name_is_found_in_each_slot_that_has_it(sides: Sides) -> None:
    first, twin, last, absent = (replace(block, block_id=slot) for slot, block in enumerate(blocks(4)))
    twin = replace(twin, block_hash=first.block_hash)
    sides.publish(*((block, header(block)) for block in (first, twin, last)))
    names = [last.block_hash, first.block_hash, absent.block_hash, first.block_hash]
    assert sides.found(*names) == [[2, 0, NO_SLOT, 0], [NO_SLOT, 1, NO_SLOT, 1]]


def test_names_that_begin_alike_are_told_apart_by_their_headers(sides: Sides) -> None:
    first, like_it = (replace(block, block_id=slot) for slot, block in enumerate(blocks(2)))
    like_it = replace(like_it, block_hash=BlockHash(first.block_hash[:8] + like_it.block_hash[8:]))
    sides.publish(*((block, header(block)) for block in (first, like_it)))
    assert sides.found(first.block_hash, like_it.block_hash) == [[0, 0], [1, 1]]
    assert [sides.refusal(slot, first) for slot in (0, 1)] == [None, FetchOutcome.MISSING]
    assert [sides.refusal(slot, like_it) for slot in (0, 1)] == [FetchOutcome.MISSING, None]


def test_a_name_with_some_bits_of_a_wanted_one_is_not_taken_for_it(sides: Sides) -> None:
    """Also one that is greater than every wanted name: among half a million slots there are some."""
    wanted, smaller, greater = (replace(block, block_id=slot) for slot, block in enumerate(blocks(3)))
    named = [
        replace(block, block_hash=BlockHash(wanted.block_hash[:2] + bytes([byte]) * (HASH_BYTES - 2)))
        for byte, block in ((0x80, wanted), (0, smaller), (0xFF, greater))
    ]
    sides.publish(*((block, header(block)) for block in named))
    assert sides.found(named[0].block_hash) == [[0]]


def test_a_name_is_found_whatever_its_bits(sides: Sides) -> None:
    [block] = blocks(1)
    block = replace(block, block_hash=BlockHash(b"\xff" * HASH_BYTES))
    sides.publish((block, header(block)))
    assert sides.found(block.block_hash) == [[block.block_id]]


def test_not_more_than_a_few_slots_of_a_name_are_tried(sides: Sides) -> None:
    [block] = blocks(1)
    copies = [replace(block, block_id=slot) for slot in range(NUM_SLOTS)]
    sides.publish(*((copy, header(copy)) for copy in copies))
    assert sides.found(block.block_hash) == [[slot] for slot in range(8)]


def test_a_header_with_anything_in_the_place_of_its_zeros_is_none(sides: Sides) -> None:
    [block] = blocks(1)
    sides.publish((block, header(block)))
    zeros = SLOT_BYTES * block.block_id + 8 + DIGEST_OFFSET - 12  # the counter before the header, the epoch behind them
    assert sides.mapping[zeros : zeros + 4] == bytes(4)
    sides.mapping[zeros] = 1
    assert sides.refusal(block.block_id, block) is Mismatch.VERSION


def test_a_slot_that_changes_under_a_copy_is_missing_whatever_was_copied(sides: Sides) -> None:
    chosen = blocks(3)
    sides.publish(*((block, header(block)) for block in chosen))
    slots = np.array([block.block_id for block in chosen])
    snapshots = sides.seen.take_snapshots(slots, chosen, epoch=EPOCH)
    assert (snapshots.refusals, snapshots.places) == ({}, [0, 1, 2])
    sides.owned.clear([chosen[0].block_id])
    damaged = bytes(16)
    outcomes: list[Verdict] = [FetchOutcome.MISSING, FetchOutcome.FETCHED, Mismatch.DIGEST]
    assert sides.seen.judge(snapshots, [DIGEST, DIGEST, damaged]) == outcomes
    outcomes[2] = FetchOutcome.FETCHED
    assert sides.seen.judge(snapshots, [DIGEST] * 3) == outcomes


@pytest.mark.parametrize(
    ("said", "mismatch"),
    [
        ({"version": 2}, Mismatch.VERSION),
        ({"magic": b"KVRX"}, Mismatch.VERSION),
        ({"layout_digest": bytes(16)}, Mismatch.LAYOUT),
        ({"payload_bytes": 1}, Mismatch.LENGTH),
        ({"num_tokens": 15}, Mismatch.TOKENS),
        ({"epoch": EPOCH + 1}, Mismatch.EPOCH),
    ],
)
def test_each_field_of_a_header_is_compared_with_the_requested_block(
    sides: Sides, said: dict[str, object], mismatch: Mismatch
) -> None:
    [block] = blocks(1)
    sides.publish((block, replace(header(block), **said)))  # type: ignore[arg-type]  # by name
    assert sides.refusal(block.block_id, block) is mismatch


def test_a_wrong_header_says_nothing_of_the_other_slots(sides: Sides) -> None:
    chosen = blocks(3)
    headers = [header(block) for block in chosen]
    headers[1] = replace(headers[1], epoch=EPOCH + 1)
    sides.publish(*zip(chosen, headers, strict=True))
    snapshots = sides.seen.take_snapshots(np.arange(3), chosen, epoch=EPOCH)
    assert (snapshots.refusals, snapshots.places) == ({1: Mismatch.EPOCH}, [0, 2])


def test_clearing_after_the_owner_has_closed_has_no_effect(sides: Sides) -> None:
    [block] = blocks(1, first_id=NUM_SLOTS - 1)
    sides.publish((block, header(block)))
    sides.owned.release()
    sides.owned.clear([block.block_id])
    assert sides.refusal(block.block_id, block) is None
