"""Which staging slot holds the copy of which block of a device's pool, and slots for blocks that arrive.

Invariant: a slot is free, claimed by one copy under way, or the copy of one block as it still is. One that is claimed
is given to nobody else until its block is published or given up: otherwise a name could be published over the bytes of
another block.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kv_connector.device.memory import BlockCopy
from kvrelay.core.named_block import NamedBlock


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """`block` of the pool is, or is about to be, in `slot`. `generation`: of the block when that was decided."""

    block: NamedBlock
    slot: int
    generation: int

    @property
    def copy(self) -> BlockCopy:
        return BlockCopy(self.block.block_id, self.slot)

    @property
    def staged(self) -> NamedBlock:
        """The block as the staging memory has it."""
        return NamedBlock(self.slot, self.block.block_hash, self.block.num_tokens)


@dataclass(frozen=True, slots=True)
class Claims:
    """`copies` are to be made. The slots in `given_up` held older copies until now. `num_refused`: blocks for which
    there is no slot, since all are claimed."""

    copies: tuple[StagedBlock, ...]
    given_up: tuple[int, ...]
    num_refused: int


class StagedCopies:
    """`forget` comes from the engine thread, everything else from the node's loop. When slots run out, the copy that
    was made or asked for longest ago gives way."""

    def __init__(self, slots: range, num_blocks: int) -> None:
        self._free = list(reversed(slots))
        self._copies: dict[int, StagedBlock] = {}  # by block id, the next to give way first
        self._generations = [0] * num_blocks  # per block of the pool, grows when it is retracted
        self._lock = threading.Lock()  # held for dictionary updates only

    def claim(self, blocks: Sequence[NamedBlock]) -> Claims:
        """Slots for those that have no copy yet. They stay taken until `standing`, `commit` or `free`."""
        copies: list[StagedBlock] = []
        given_up: list[int] = []
        with self._lock:
            wanted = [block for block in blocks if not self._touch(block)]
            for block in wanted:
                slot = self._take(block.block_id, given_up)
                if slot is not None:
                    copies.append(StagedBlock(block, slot, self._generations[block.block_id]))
        return Claims(tuple(copies), tuple(given_up), len(wanted) - len(copies))

    def standing(self, copies: Sequence[StagedBlock]) -> list[StagedBlock]:
        """Those whose blocks still are what was copied; the slots of the others are free again."""
        with self._lock:
            good = [copy for copy in copies if self._stands(copy)]
            self._free.extend(copy.slot for copy in copies if not self._stands(copy))
        return good

    def commit(self, copies: Sequence[StagedBlock]) -> list[int]:
        """These are published. Slots of blocks that were retracted meanwhile, to be given back with `free`: until now
        nobody could be given them, so what was published under a name was that block's content."""
        stale: list[int] = []
        with self._lock:
            for copy in copies:
                if self._stands(copy) and copy.block.block_id not in self._copies:
                    self._copies[copy.block.block_id] = copy
                else:
                    stale.append(copy.slot)
        return stale

    def forget(self, block_ids: Sequence[int]) -> list[int]:
        """These blocks lose their content. The slots of their copies, to be given back with `free`; a copy under way is
        not among them."""
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

    def _touch(self, block: NamedBlock) -> bool:
        """Whether there is a copy of exactly this block, which is now the last to give way."""
        copy = self._copies.get(block.block_id)
        if copy is None or copy.block != block:
            return False
        self._copies[block.block_id] = self._copies.pop(block.block_id)
        return True

    def _take(self, block_id: int, given_up: list[int]) -> int | None:
        known_by_another_name = self._copies.pop(block_id, None)
        if known_by_another_name is not None:
            given_up.append(known_by_another_name.slot)
            return known_by_another_name.slot
        if self._free:
            return self._free.pop()
        if not self._copies:
            return None
        oldest = self._copies.pop(next(iter(self._copies)))
        given_up.append(oldest.slot)
        return oldest.slot


class ArrivalSlots:
    """Slots that fetches take in turn and give back. On the node's loop."""

    def __init__(self, slots: range) -> None:
        self._free = list(slots)
        self._turn = asyncio.Lock()  # who waits gets slots in the order of asking
        self._freed = asyncio.Event()

    async def take(self, most: int) -> list[int]:
        """Between one and `most` slots; waits while there is none."""
        async with self._turn:
            while not self._free:
                self._freed.clear()
                await self._freed.wait()
            taken, self._free = self._free[:most], self._free[most:]
            return taken

    def give_back(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)
        self._freed.set()
