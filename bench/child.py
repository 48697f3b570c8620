"""Python processes that a benchmark starts: each has to say something in time, and ends with the benchmark."""

import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvrelay.core.errors import UnavailableError

START_SECONDS = 120.0
STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Child:
    """A running process. `name` is what messages call it."""

    name: str
    process: "subprocess.Popen[bytes]"

    def read_line(self, seconds: float = START_SECONDS) -> str:
        """Returns the next line of its standard output. Raises UnavailableError when none comes within `seconds`, or
        when the process has ended."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not readable:
            raise UnavailableError(f"{self.name} has printed nothing for {seconds:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise UnavailableError(f"{self.name} ended before it was ready; its messages are above")
        return line.decode().strip()


@contextmanager
def child(name: str, arguments: Sequence[str]) -> Iterator[Child]:
    """Starts this interpreter with `arguments`. When the context ends, the process's standard input is closed, which
    tells it to end; it is killed if it has not done so after STOP_SECONDS."""
    command = [sys.executable, *arguments]
    # Unbuffered: `read_line` waits on the pipe itself, and must find there all that has not been read.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            yield Child(name, process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
