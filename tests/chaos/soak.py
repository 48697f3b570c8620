"""A soak: an undisturbed load for a long time, and what every process holds meanwhile."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.nodes import ChaosCluster, rss_of
from tests.chaos.storm import TOLERANCE_BYTES

_logger = logging.getLogger(__name__)
_NUM_LOOKS = 20
_TOLERANCE = 8  # open files or threads: the connections of the clients come and go


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds: bytes of memory of its own, open files, and threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Holdings":
        process = Path(f"/proc/{pid}")
        return cls(rss_of(pid), len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())))

    def __str__(self) -> str:
        return f"{self.memory / 2**20:.1f} MiB, {self.files} files, {self.threads} threads"


async def soak(cluster: ChaosCluster, seconds: float) -> list[dict[str, Holdings]]:
    """Looks at the router and all nodes, twenty times in so many seconds, and says what it sees."""
    looks = []
    for _ in range(_NUM_LOOKS):
        await asyncio.sleep(seconds / _NUM_LOOKS)
        processes = (cluster.router, *cluster.nodes.values())
        looks.append({process.name: Holdings.of(process.pid) for process in processes})
        _logger.info("%s", "; ".join(f"{name} {holdings}" for name, holdings in looks[-1].items()))
    return looks


def growth(looks: Sequence[Mapping[str, Holdings]]) -> dict[str, int]:
    """Returns by how many bytes each process has grown since half of the time, when its caches have filled."""
    middle, last = looks[len(looks) // 2], looks[-1]
    return {name: last[name].memory - middle[name].memory for name in last}


def leaks(looks: Sequence[Mapping[str, Holdings]]) -> list[str]:
    """Returns which processes hold much more in the end than after half of the time, and of what."""
    middle, last = looks[len(looks) // 2], looks[-1]
    return [
        f"{name} holds {last[name]} in the end, and held {middle[name]} after half of the time"
        for name in last
        if last[name].memory - middle[name].memory > TOLERANCE_BYTES
        or last[name].files - middle[name].files > _TOLERANCE
        or last[name].threads - middle[name].threads > _TOLERANCE
    ]
