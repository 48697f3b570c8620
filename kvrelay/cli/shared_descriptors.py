"""Memory that the nodes of one machine inherit as descriptors: the table through which they lend each other cores, and
the store of the weights that they share.

Invariant: without such memory a cluster serves all the same, each node with cores and weights of its own.
"""

import sys
from collections.abc import Callable

from kvrelay.core.process.core_table import CoreTable
from kvrelay.core.process.weight_store import WeightStore


def create_core_table(num_cores: int, num_nodes: int, threads: int, *, say: Callable[[str], None]) -> int | None:
    """Returns a descriptor of the table for nodes of `threads` threads each, which together use no more cores than the
    sum of their threads, or None if they cannot share one."""
    num_shared = min(num_cores, num_nodes * threads)
    return _create(num_nodes, lambda: CoreTable.create(num_shared, num_nodes), "nodes lend each other no cores", say)


def create_weight_store(num_nodes: int, *, say: Callable[[str], None]) -> int | None:
    """Returns a descriptor of the memory for the nodes' weights, or None if they cannot share any."""
    return _create(num_nodes, WeightStore.create, "every node has weights of its own", say)


def _create(num_nodes: int, create: Callable[[], int], otherwise: str, say: Callable[[str], None]) -> int | None:
    if num_nodes < 2 or sys.platform != "linux":
        return None
    try:
        return create()
    except (AttributeError, OSError) as error:  # an old libc, or a sandbox that forbids it
        say(f"{otherwise}: no memory that they could share ({error})")
        return None
