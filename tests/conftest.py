"""Fixtures for every test: nothing may be left in shared memory, and a real Redis for those that ask."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Assertions of helpers say what differed, too. Before anything is imported from these packages.
pytest.register_assert_rewrite("tests.cluster", "tests.engine", "tests.kernels", "tests.kv_connector", "tests.router")

from kv_connector.ucx.environment import prepare_ucx_environment  # noqa: E402
from tests.redis_server import RedisServer  # noqa: E402

# Before any test imports a module that loads UCX; its children inherit it.
prepare_ucx_environment()

_SHM = Path("/dev/shm")


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
