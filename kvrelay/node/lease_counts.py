"""How leases have ended since the node started. Written by the lease table, read by the node's service."""

from dataclasses import dataclass


@dataclass(slots=True)
class LeaseCounts:
    """They only grow. `ended_early`: others waited for the blocks."""

    released: int = 0
    expired: int = 0
    ended_early: int = 0
