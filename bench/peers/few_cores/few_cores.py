"""A plugin of vllm, found by every vllm process that has this folder in PYTHONPATH: two servers fit on two cores.

By itself vllm's NIXL connector moves the thread that computes to the machine's last core, whatever
VLLM_CPU_OMP_THREADS_BIND says, so that two servers share that core and leave the others idle; and NIXL's progress
thread burns a core per server.
"""

import os

from nixl._api import nixl_agent_config  # type: ignore[import-not-found]


def register() -> None:
    nixl_agent_config.__init__.__defaults__ = (False, *nixl_agent_config.__init__.__defaults__[1:])
    os.sched_setaffinity = lambda pid, mask: None
