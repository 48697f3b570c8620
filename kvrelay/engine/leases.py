"""The leases of PRODUCE requests: a lease keeps the blocks that a request has offered pinned until it is released.

Invariant: a lease pins exactly the leading blocks that it lists. It may outlive its request or end before it.
"""

from kvrelay.engine.block_names import BlockNames
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.request import KVRole
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step_result import Changes


class Leases:
    """The open leases, by request id."""

    def __init__(self, pool: BlockPool, names: BlockNames, changes: Changes) -> None:
        self._pool = pool
        self._names = names
        self._changes = changes
        self._blocks: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._blocks

    def open(self, request_id: str) -> None:
        self._blocks[request_id] = []

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Adds the first `num_blocks` blocks of a PRODUCE request to its lease, and reports them as progress. If the
        lease has ended, nothing is pinned, but the progress is still reported to those who wait for the blocks.
        """
        request = sequence.request
        if request.role is not KVRole.PRODUCE:
            return
        lease = self._blocks.get(request.request_id)
        if lease is not None:
            blocks = sequence.block_table[len(lease) : num_blocks]
            self._pool.pin(blocks)
            lease.extend(blocks)
        if num_blocks > sequence.num_reported_blocks:
            if sequence.num_reported_blocks == 0:
                self._names.offer_hits(sequence)
            sequence.num_reported_blocks = num_blocks
            self._changes.progress.append((request.request_id, num_blocks))

    def restart(self, sequence: Sequence) -> None:
        """Empties the lease of a preempted request: two such requests would otherwise wait for each other's blocks for
        ever."""
        lease = self._blocks.get(sequence.request.request_id)
        if lease:
            self._pool.unpin(lease)
            lease.clear()

    def release(self, request_id: str) -> None:
        """Ends a lease and unpins its blocks. Idempotent."""
        lease = self._blocks.pop(request_id, None)
        if lease is not None:
            self._pool.unpin(lease)
            self._changes.load_changed = True

    def check_idle(self) -> None:
        """Raises AssertionError if a lease is open."""
        assert not self._blocks, f"leases left: {sorted(self._blocks)}"
