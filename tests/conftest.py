"""Fixtures for every test: nothing may be left in shared memory, and a real Redis for those that ask. What the shell
says about settings, proxies and interrupts changes no test."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Assertions of helpers say what differed, too. Before anything is imported from these packages.
pytest.register_assert_rewrite("tests.cluster", "tests.engine", "tests.kernels", "tests.kv_connector", "tests.router")

from kv_connector.ucx.environment import prepare_ucx_environment  # noqa: E402
from tests.redis_server import RedisServer  # noqa: E402

# Also for all children: a user may have settings of his own, a proxy and a narrow terminal, and a script that runs the
# tests in the background has interrupts ignored.
for _name in list(os.environ):
    if _name.startswith("KVRELAY_") or _name.lower().endswith("_proxy") or _name == "COLUMNS":
        del os.environ[_name]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any test imports a module that loads UCX; its children inherit it.
prepare_ucx_environment()

_SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def no_segment_left_behind() -> Iterator[None]:
    """Fails a test that leaves a segment which this process has mapped. What other processes leave is checked by those
    who start them, because they know it from what others on this machine leave."""
    before = set(_SHM.glob("kvrelay-*"))
    yield
    maps = Path("/proc/self/maps").read_text()
    left = [path.name for path in set(_SHM.glob("kvrelay-*")) - before if path.name in maps]
    assert not left, f"left in {_SHM}: {left}"


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def without_collections() -> Iterator[None]:
    """Lets no collection of garbage run, for tests of what is forgotten without one: full ones are rare."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
