"""Counts of how leases have ended. Written by the prefill node's lease table, read by the node's service."""

from dataclasses import dataclass


@dataclass(slots=True)
class LeaseCounts:
    """How many leases have ended since the node started. `ended_early`: because requests waited for their blocks."""

    released: int = 0
    expired: int = 0
    ended_early: int = 0
