"""Processes of peers: one that must succeed, and a server that is awaited, and ended with all that it started."""

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench.peers.base import PeerError

START_SECONDS = 600.0
STOP_SECONDS = 30.0
_POLL_SECONDS = 0.25
_SAMPLE_SECONDS = 2.0
_TAIL_LINES = 25
_REST_SECONDS = 0.5
_REST_SHARE = 0.1  # of a core


def run(command: Sequence[str], log: Path) -> None:
    """Raises PeerError with the end of its output."""
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    if status != 0:
        raise PeerError(f"`{' '.join(command)}` ended with status {status}:\n{tail(log)}")


@dataclass(frozen=True, slots=True)
class Child:
    """A server that was started; it may not answer yet."""

    process: "subprocess.Popen[bytes]"
    log: Path
    started: float

    def await_ready(self, health: str) -> float:
        """The seconds from its start until `health` answered 200. Raises PeerError."""
        while not _answers(health):
            name = str(self.process.args[0]) if isinstance(self.process.args, Sequence) else str(self.process.args)
            if self.process.poll() is not None:
                status = self.process.returncode
                raise PeerError(f"`{name}` ended with status {status} (log: {self.log}):\n{tail(self.log)}")
            if time.monotonic() - self.started > START_SECONDS:
                raise PeerError(f"`{name}` does not answer at {health} (log: {self.log}):\n{tail(self.log)}")
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - self.started


@contextmanager
def started(command: Sequence[str], log: Path, environment: Mapping[str, str | None] | None = None) -> Iterator[Child]:
    """It ends with the context. `environment` is in addition to ours; None takes away.

    Its process group is its own, its session is ours: Linux shares cores between sessions before it shares them
    between processes (autogroup), so that a server which waits by sched_yield would keep half a core from one in
    another session.
    """
    changed = {**os.environ, **(environment or {})}
    with log.open("w") as output:
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in changed.items() if value is not None},
            process_group=0,
        )
    try:
        yield Child(process, log, begin)
    finally:
        _end(process)


@contextmanager
def serving(
    command: Sequence[str], log: Path, health: str, environment: Mapping[str, str | None] | None = None
) -> Iterator[float]:
    """The seconds until it answered."""
    with started(command, log, environment) as child:
        yield child.await_ready(health)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


class PeakMemory:
    """The most memory that the descendants of this process held together, sampled while the context lasts.

    What several share is counted once (proportional set size). A sample of a large process takes milliseconds.
    """

    def __init__(self, sample_seconds: float = _SAMPLE_SECONDS) -> None:
        self.bytes = 0
        self._sample_seconds = sample_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(self._sample_seconds):
            self.bytes = max(self.bytes, sum(map(_memory_bytes, descendants(os.getpid())[1:])))


def await_rest(seconds: float) -> None:
    """Until the descendants of this process compute nothing to speak of: after the last request, threads that wait for
    another may spin for a while. Raises PeerError when they still do after `seconds`."""
    end = time.monotonic() + seconds
    before = _processor_seconds()
    while True:
        time.sleep(_REST_SECONDS)
        now = _processor_seconds()
        if now - before < _REST_SHARE * _REST_SECONDS:
            return
        if time.monotonic() > end:
            raise PeerError(f"the servers are busy {seconds:g} s after the last request: measure without --together")
        before = now


def _processor_seconds() -> float:
    """Of all descendants of this process."""
    ticks = 0
    for process in descendants(os.getpid())[1:]:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except (OSError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (OSError, ProcessLookupError):
        return 0  # it has just ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def descendants(root: int) -> list[int]:
    """`root` and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for number in found:
        found += children.get(number, [])
    return found


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """SIGINT first (an orderly end), SIGKILL for what is left of its group."""
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        try:
            process.wait(STOP_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing is left
    process.wait()
