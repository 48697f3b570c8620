"""A plugin for vllm with which two servers fit on two cores. Every vllm process finds it that has this folder in
PYTHONPATH.

By itself vllm's NIXL connector moves the thread that computes to the machine's last core, whatever
VLLM_CPU_OMP_THREADS_BIND says, so that two servers share that core and leave the others idle; and NIXL's progress
thread keeps a core busy in each server. Without that thread, KV would wait seconds for a step of the prefill server to
end. With this plugin it rests for a while between events, which NIXL supports.
"""

import os
from typing import Any

from nixl import _api  # type: ignore[import-not-found]

_PROGRESS_MICROSECONDS = 1000


def register() -> None:
    """Changes the whole process: nothing in it can choose cores any more, and all progress threads of NIXL rest."""
    os.sched_setaffinity = lambda pid, mask: None
    create_agent = _api.nixlBind.nixlAgent

    def create_resting_agent(name: str, config: Any) -> Any:
        config.pthrDelay = _PROGRESS_MICROSECONDS
        return create_agent(name, config)

    _api.nixlBind.nixlAgent = create_resting_agent
