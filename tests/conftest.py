"""Fixtures for every test: nothing may be left in shared memory, and a real Redis for those that ask.

With pytest-xdist this also says which tests one worker runs, and which ones begin.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import RedisServer

_SHM = Path("/dev/shm")
_ROOT = Path(__file__).parent
_ORPHAN_SECONDS = 1.0  # the owner of a new segment has locked it long before

# The longest first, so that nobody waits for one of them at the end.
_LONGEST = (
    "processes",
    "kernels/test_triton_interpreted.py",
    "simulation/test_simulation.py",
    "simulation/test_fail_at_n.py",
    "simulation/test_moments.py",
    "kernels/test_triton_compiled.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A worker runs whole files, so that a fixture of a module is set up once."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    units = {item: _unit(item.path.relative_to(_ROOT)) for item in items}
    items.sort(key=lambda item: _LONGEST.index(units[item]) if units[item] in _LONGEST else len(_LONGEST))
    for item, unit in units.items():
        item.add_marker(pytest.mark.xdist_group(unit))


def _unit(path: Path) -> str:
    """Clusters of processes are one worker's: their starts take seconds, and two of them would starve each other. So are
    connectors: their tests share the names of segments."""
    if path.parts[0] in ("chaos", "e2e"):
        return "processes"
    return "connectors" if path.parts[0] == "kv_connector" else path.as_posix()


@pytest.fixture(autouse=True)
def no_segment_left_behind() -> Iterator[None]:
    """Fails a test after which a segment is still mapped by this process or has no living owner."""
    before = set(_SHM.glob("kvrelay-*"))
    yield
    maps = Path("/proc/self/maps").read_text()
    left = [path.name for path in set(_SHM.glob("kvrelay-*")) - before if path.name in maps or _is_orphan(path)]
    assert not left, f"left in {_SHM}: {left}"


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


def _is_orphan(path: Path) -> bool:
    """Stays unlocked: tests that run beside this one may have created a segment and not locked it yet."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while is_orphan := _is_unlocked(path):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return is_orphan


def _is_unlocked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return path.exists()
