"""Another process that holds blocks, started by tests that fetch from it, stop it or kill it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvrelay.core.kv.source import KVSource
from tests.kv_connector.backends import EPOCH

StartOwner = Callable[..., "OwnerProcess"]

_ROOT = Path(__file__).parents[2]


class OwnerProcess:
    """A process that runs `module` of this package, such as "ucx.owner", which publishes `blocks(...)`, prints its
    endpoint, and closes its connector when its standard input ends."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Returns once the blocks can be fetched."""
        command = [sys.executable, "-m", f"tests.kv_connector.{module}", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
        assert self._process.stdout is not None
        self.source = KVSource("child/0", EPOCH, self._process.stdout.readline().strip())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Lets the process close its connector, and waits for its end."""
        self._process.communicate()

    def kill(self) -> None:
        """Kills the process, however it is. Idempotent."""
        self._process.kill()
        self._process.communicate()
