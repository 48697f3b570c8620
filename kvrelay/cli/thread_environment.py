"""The environment that a node's threads need: how many there are, how long a waiting one keeps its core, and that each
may run on all of the process's cores."""

from collections.abc import Mapping

# Where torch multiplies (docs/cpu.md, Threads of a step), OpenMP's threads spin between two products, because
# sleeping costs more. By default they keep spinning for many milliseconds after the step, on a core that others need.
# This many spins outlast the gaps within a step and little more (docs/decisions.md, Threads that wait).
_SPIN_COUNT = "10000"
_WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def thread_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Returns the variables to add for a node of `threads` threads. If the user has set how threads wait, that is left
    alone. Threads are bound to no cores: OpenMP's library, which torch brings, would bind the process itself to the
    first of them, and with it all threads that are not its own."""
    added = {"OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "false"}
    if not any(name in environment for name in _WAITING_VARIABLES):
        added["GOMP_SPINCOUNT"] = _SPIN_COUNT
    return added
