"""Which staging slot holds the copy of which block of a device's pool, and the slots for arriving blocks.

Invariant: a slot is free, claimed by one publication, or holds the copy of one block whose content has not changed
since. A claimed slot is given to nobody else until its block is published or given up, not even when that is retracted:
otherwise a name could be published over the bytes of another block.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kv_connector.device.memory import BlockCopy
from kvrelay.core.kv.named_block import NamedBlock


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """A copy of `block` in `slot`, or one that is about to be made. `generation`: the block's, when the slot was
    claimed."""

    block: NamedBlock
    slot: int
    generation: int

    @property
    def copy(self) -> BlockCopy:
        return BlockCopy(self.block.block_id, self.slot)

    @property
    def staged(self) -> NamedBlock:
        """Returns the same block by its id in the staging memory."""
        return NamedBlock(self.slot, self.block.block_hash, self.block.num_tokens)


@dataclass(frozen=True, slots=True)
class SlotClaims:
    """The result of `StagedCopies.claim`: `copies` are to be made, those in `existing` only to be offered again; the
    slots in `given_up` held older copies until now; `num_refused` blocks get no slot, since all are claimed."""

    copies: tuple[StagedBlock, ...]
    existing: tuple[StagedBlock, ...]
    given_up: tuple[int, ...]
    num_refused: int


class StagedCopies:
    """The copies in the staging memory. The engine thread calls `forget` and `free`, the node's loop everything, `free`
    as well. When slots run out, the copy that was made or claimed again longest ago gives way."""

    def __init__(self, slots: range, num_blocks: int) -> None:
        self._free = list(reversed(slots))
        self._copies: OrderedDict[int, StagedBlock] = OrderedDict()  # by block id, the next to give way first
        self._generations = [0] * num_blocks  # per block of the pool, grows when it is retracted
        self._lock = threading.Lock()  # held for dictionary updates only

    def claim(self, blocks: Sequence[NamedBlock], *, offer_again: bool) -> SlotClaims:
        """Claims slots for the blocks that have no copy yet, until `commit` or `free`; with `offer_again` also those of
        the copies that are there, until `commit`."""
        copies: list[StagedBlock] = []
        existing: list[StagedBlock] = []
        wanted: list[NamedBlock] = []
        given_up: list[int] = []
        with self._lock:
            for block in blocks:
                if not self._holds(block):
                    wanted.append(block)
                elif offer_again:
                    existing.append(self._copies.pop(block.block_id))
                else:
                    self._copies.move_to_end(block.block_id)
            for block in wanted:
                slot = self._take(block.block_id, given_up)
                if slot is not None:
                    copies.append(StagedBlock(block, slot, self._generations[block.block_id]))
        return SlotClaims(tuple(copies), tuple(existing), tuple(given_up), len(wanted) - len(copies))

    def standing(self, copies: Sequence[StagedBlock]) -> list[StagedBlock]:
        """Returns the copies whose blocks have not changed since."""
        with self._lock:
            return [copy for copy in copies if self._stands(copy)]

    def commit(self, copies: Sequence[StagedBlock]) -> list[int]:
        """Takes note that these claimed copies are published. Returns the slots of blocks that were retracted
        meanwhile; the caller retracts and frees them. Until then they were claimed, so each name was published with its
        content."""
        stale: list[int] = []
        with self._lock:
            for copy in copies:
                if self._stands(copy) and copy.block.block_id not in self._copies:
                    self._copies[copy.block.block_id] = copy
                else:
                    stale.append(copy.slot)
        return stale

    def forget(self, block_ids: Sequence[int]) -> list[int]:
        """Takes note that blocks lose their content. Returns the slots of their copies, which the caller frees; those
        that are claimed are not among them."""
        with self._lock:
            slots: list[int] = []
            for block_id in block_ids:
                self._generations[block_id] += 1
                copy = self._copies.pop(block_id, None)
                if copy is not None:
                    slots.append(copy.slot)
            return slots

    def free(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._free.extend(slots)

    def _stands(self, copy: StagedBlock) -> bool:
        return self._generations[copy.block.block_id] == copy.generation

    def _holds(self, block: NamedBlock) -> bool:
        """Tells whether there is a copy of exactly this block."""
        copy = self._copies.get(block.block_id)
        return copy is not None and copy.block == block

    def _take(self, block_id: int, given_up: list[int]) -> int | None:
        known_by_another_name = self._copies.pop(block_id, None)
        if known_by_another_name is not None:
            given_up.append(known_by_another_name.slot)
            return known_by_another_name.slot
        if self._free:
            return self._free.pop()
        if not self._copies:
            return None
        _, oldest = self._copies.popitem(last=False)
        given_up.append(oldest.slot)
        return oldest.slot


class ArrivalSlots:
    """The slots that fetches take in turn and give back. Used on the node's loop."""

    def __init__(self, slots: range) -> None:
        self._free = list(slots)
        self._turn = asyncio.Lock()  # slots are given out in the order of the calls
        self._freed = asyncio.Event()

    async def take(self, most: int) -> list[int]:
        """Takes between one and `most` slots; waits while there is none."""
        async with self._turn:
            while not self._free:
                self._freed.clear()
                await self._freed.wait()
            taken, self._free = self._free[:most], self._free[most:]
            return taken

    def give_back(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)
        self._freed.set()
