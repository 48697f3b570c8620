"""How much the relay takes on, and how long it tries, as set by the operator."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Settings of the same names say more about each. Times are in seconds.

    `max_concurrent_requests`: requests that run or wait at a time. `max_node_losses`: how many nodes may end at the
    same point of an output. `node_wait`: how long a request that has lost its decode node waits for one while none is
    live, or to know whether too many have ended. `lease_ttl`: how long a prefill node keeps blocks for a request that
    it does not hear of. `node_timeout`: how long a node may take to answer a small call.
    """

    max_concurrent_requests: int
    max_node_losses: int
    node_wait: float
    lease_ttl: float
    node_timeout: float
