"""Processes of peers: one that must succeed, and a server that is awaited, and ended with all that it started."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.peers.base import PeerError

START_SECONDS = 600.0
STOP_SECONDS = 30.0
_POLL_SECONDS = 0.25
_TAIL_LINES = 25


def run(command: Sequence[str], log: Path) -> None:
    """Raises PeerError with the end of its output."""
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    if status != 0:
        raise PeerError(f"`{' '.join(command)}` ended with status {status}:\n{tail(log)}")


@contextmanager
def serving(
    command: Sequence[str], log: Path, health: str, environment: Mapping[str, str | None] | None = None
) -> Iterator[tuple[int, float]]:
    """Its process id, and the seconds until `health` answered 200. `environment` is in addition to ours; None takes
    away."""
    changed = {**os.environ, **(environment or {})}
    with log.open("w") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in changed.items() if value is not None},
            start_new_session=True,
        )
    try:
        while not _answers(health):
            if process.poll() is not None:
                raise PeerError(f"`{command[0]}` ended with status {process.returncode} (log: {log}):\n{tail(log)}")
            if time.monotonic() - started > START_SECONDS:
                raise PeerError(f"`{command[0]}` does not answer at {health} (log: {log}):\n{tail(log)}")
            time.sleep(_POLL_SECONDS)
        yield process.pid, time.monotonic() - started
    finally:
        _end(process)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def memory_bytes(root: int) -> int:
    """Memory of a process and its descendants; what several share is counted once (proportional set size)."""
    total = 0
    for number in descendants(root):
        try:
            lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
        except (OSError, ProcessLookupError):
            continue  # it has just ended
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


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
    """SIGINT first (an orderly end), SIGKILL for what is left of its session."""
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
