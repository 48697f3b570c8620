"""A real redis-server for tests, on a free TCP port of the loopback interface, without persistence."""

import socket
import subprocess
from pathlib import Path

_ATTEMPTS = 5  # another process may take the free port first


class RedisServer:
    """The constructor returns when the server accepts connections. A missing redis-server is an error."""

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        """`port` 0 takes a free one."""
        for _ in range(_ATTEMPTS):
            self.port = port or _free_port()
            command = [
                "redis-server",
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
            ]
            self._process = subprocess.Popen([*command, "--dir", str(directory)], stdout=subprocess.PIPE, text=True)
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

    def _ready(self) -> bool:
        assert self._process.stdout is not None
        return any("Ready to accept connections" in line for line in self._process.stdout)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
