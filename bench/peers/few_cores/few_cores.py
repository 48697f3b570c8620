"""A plugin of vllm, found by every vllm process that has this folder in PYTHONPATH: two servers fit on two cores.

By itself vllm's NIXL connector moves the thread that computes to the machine's last core, whatever
VLLM_CPU_OMP_THREADS_BIND says, so that two servers share that core and leave the others idle; and NIXL's progress
thread burns a core per server. Without that thread KV would wait for the prefill server's step to end, seconds; here
the thread rests for a while between events, as NIXL can when it is told how long.
"""

import os
from typing import Any

from nixl import _api  # type: ignore[import-not-found]

_PROGRESS_MICROSECONDS = 1000


def register() -> None:
    """For the whole process: nothing in it can choose cores any more, and all of NIXL's threads rest."""
    os.sched_setaffinity = lambda pid, mask: None
    create_agent = _api.nixlBind.nixlAgent

    def create_resting_agent(name: str, config: Any) -> Any:
        config.pthrDelay = _PROGRESS_MICROSECONDS
        return create_agent(name, config)

    _api.nixlBind.nixlAgent = create_resting_agent
