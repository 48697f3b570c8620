"""How the nodes of one machine share its cores: how many there are, the table through which nodes lend them to each
other, and how long a waiting thread keeps its core."""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from kvrelay.core.core_table import CoreTable

_logger = logging.getLogger(__name__)

# Where torch multiplies (docs/cpu.md, Threads of a step), OpenMP's threads spin between two products, because
# sleeping costs more. By default they keep spinning for many milliseconds after the step, on a core that others need.
# This many spins outlast the gaps within a step and little more (docs/benchmarks.md).
_SPIN_COUNT = "10000"
_WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def available_cores() -> int:
    """Cores this process may use: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def thread_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Variables for a node of `threads` threads; if the user has set how threads wait, that is left alone."""
    added = {"OMP_NUM_THREADS": str(threads)}
    if not any(name in environment for name in _WAITING_VARIABLES):
        added["GOMP_SPINCOUNT"] = _SPIN_COUNT
    return added


def create_core_table(num_cores: int, num_nodes: int, threads: int) -> int | None:
    """A descriptor of the table for nodes of `threads` threads each, which together use no more than their sum. None if
    there is nothing to lend, or no such memory."""
    if num_nodes < 2 or sys.platform != "linux":
        return None
    try:
        return CoreTable.create(min(num_cores, num_nodes * threads), num_nodes)
    except (AttributeError, OSError) as error:  # an old libc, or a sandbox that forbids it
        _logger.warning("nodes lend each other no cores: no memory that they could share (%s)", error)
        return None
