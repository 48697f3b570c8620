"""A real redis-server for tests, on a free TCP port of the loopback interface, without persistence."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.free_port import free_port

_ATTEMPTS = 5  # another process may take the free port first


class RedisServer:
    """The constructor returns when the server accepts connections. A missing redis-server is an error."""

    def __init__(self, directory: Path, *, port: int = 0, options: Sequence[str] = ()) -> None:
        """Starts a server at `port`; 0 takes a free one."""
        self._directory = directory
        self._options = options
        for _ in range(_ATTEMPTS):
            self.port = port or free_port()
            self._process = self._spawn()
            if self._ready():
                return
            self.stop()
        raise RuntimeError("redis-server did not start")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Kills the server. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def restart(self) -> None:
        """Starts another server, which is empty, at the same address. Called after `stop`."""
        self._process = self._spawn()
        if not self._ready():
            self.stop()
            raise RuntimeError(f"redis-server did not start again on port {self.port}")

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def _spawn(self) -> "subprocess.Popen[str]":
        address = ["--port", str(self.port), "--bind", "127.0.0.1"]
        storage = ["--save", "", "--appendonly", "no", "--dir", str(self._directory)]
        return subprocess.Popen(["redis-server", *address, *storage, *self._options], stdout=subprocess.PIPE, text=True)

    def _ready(self) -> bool:
        assert self._process.stdout is not None
        return any("Ready to accept connections" in line for line in self._process.stdout)
