"""The seam of a pool that the host can not look into: blocks are copied to host memory and back, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_connector.base import PoolBuffer


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block `block_id` of the pool and block `slot` of the staging memory; which way is the method's to say."""

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
        """From the pool into the staging. The blocks are complete: the step that wrote them has been collected. When
        this has returned, the host can read them."""
        ...

    def from_host(self, copies: Sequence[BlockCopy]) -> None:
        """From the staging into the pool, behind everything that the engine has given to the device until now: a step
        that still runs may belong to the blocks' last owner. When this has returned, steps given to the device from now
        on see the blocks, and the staging can be written again."""
        ...

    def detach(self) -> None:
        """The staging memory is not used any more. Idempotent."""
        ...
