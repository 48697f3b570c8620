"""Processes of peers: commands that must succeed, and servers that are awaited and ended with all that they started."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from bench.peers.base import PeerError
from bench.proc_stat import parent_of, processor_seconds

RUN_SECONDS = 3600.0  # a slow download, or a build on few cores
START_SECONDS = 600.0
STOP_SECONDS = 30.0
_POLL_SECONDS = 0.25
_SAMPLE_SECONDS = 2.0
_TAIL_LINES = 25
_REST_SECONDS = 0.5
_REST_SHARE = 0.1  # of a core


# Our servers are on this machine, whatever proxy the environment names for the way out.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def exit_on_signals() -> None:
    """Has SIGTERM, and SIGHUP as of a terminal that is closed, end this process in order, so that what it has started
    ends, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has the second one ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def run(command: Sequence[str], log: Path, *, seconds: float = RUN_SECONDS) -> None:
    """Runs a command with its output appended to `log`. Raises PeerError with the end of that output when the command
    fails or takes longer than `seconds`."""
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        output_of(command, log, stdout=output, stderr=subprocess.STDOUT, seconds=seconds)


def output_of(
    command: Sequence[str], log: Path, *, stdout: int | IO[str], stderr: int | IO[str], seconds: float
) -> bytes:
    """Runs a command that writes to `log`, and returns what it wrote to `stdout` if that is a pipe. When this returns
    or raises, all that the command has started has ended. Raises PeerError with the end of `log` when the command fails
    or takes longer than `seconds`."""
    text = " ".join(command)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, process_group=0)
    except FileNotFoundError as error:
        raise PeerError(f"there is no program {error.filename}: install it") from error
    try:
        found, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise PeerError(f"`{text}` was ended after {seconds:g} s (log: {log}):\n{tail(log)}") from None
    finally:
        _kill_group(process)
    if process.returncode != 0:
        raise PeerError(f"`{text}` ended with status {process.returncode} (log: {log}):\n{tail(log)}")
    return found


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A server that may not answer yet."""

    process: "subprocess.Popen[bytes]"
    log: Path
    started: float

    def await_ready(self, health: str) -> float:
        """Returns the seconds from the server's start until `health` answered 200. Raises PeerError when the server has
        ended, or does not answer in time."""
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
def started(
    command: Sequence[str], log: Path, variables: Mapping[str, str | None] | None = None
) -> Iterator[StartedServer]:
    """Runs a server until the context ends. `variables` are added to our environment; None removes one.

    The server has a process group of its own, but stays in our session: Linux divides cores between sessions before it
    divides them between processes (autogroup), so that a server that waits by sched_yield would take half a core from
    one in another session.
    """
    changed = {**os.environ, **(variables or {})}
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
        yield StartedServer(process, log, begin)
    finally:
        _end(process)


@contextmanager
def serving(
    command: Sequence[str], log: Path, health: str, variables: Mapping[str, str | None] | None = None
) -> Iterator[float]:
    """Runs a server until the context ends; yields the seconds until it answered. Raises PeerError."""
    with started(command, log, variables) as server:
        yield server.await_ready(health)


def free_port() -> int:
    """Returns a port that nobody listens on now; another process may still take it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


class PeakMemory:
    """The largest amount of memory that the descendants of this process held together, sampled while the context lasts.

    Memory that several share is counted once (proportional set size). A sample of a large process takes milliseconds.
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
    """Waits until the descendants of this process are all but idle: after the last request, threads that wait for
    others may spin for a while. Raises PeerError when they still do after `seconds`."""
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
    """Returns the processor time of all descendants of this process."""
    seconds = 0.0
    for process in descendants(os.getpid())[1:]:
        with suppress(OSError):  # it has just ended
            seconds += processor_seconds(process)
    return seconds


def _memory_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has just ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def descendants(root: int) -> list[int]:
    """Returns `root` and all processes below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has just ended
                children.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
    found = [root]
    for number in found:
        found += children.get(number, [])
    return found


def _answers(url: str) -> bool:
    try:
        with _OPENER.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a server in order with SIGINT, and with SIGTERM if that does not help; then kills the rest of its group."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            try:
                process.wait(STOP_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:  # also when Ctrl-C or SIGTERM comes again meanwhile
        _kill_group(process)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
