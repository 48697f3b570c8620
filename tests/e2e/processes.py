"""Programs started exactly as a user does, with the installed `kvrelay`, and what the kernel knows about them.

Every process of a cluster has its model among its arguments. Each test links the model under a path of its own, so that
this path finds all processes of the test's programs, orphans included, and no others.
Invariant: after the context of a `Program` none of its processes is left, whether or not the test has passed.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KVRELAY = Path(sys.executable).with_name("kvrelay")
PATIENCE_SECONDS = 30.0
START_SECONDS = 90.0  # a cluster's processes load their models one beside the other


class Program:
    """A running `kvrelay ARGUMENTS` in a process group of its own, as a shell starts it. `log` gets its standard error,
    `environment` is added to ours, `descriptors` are inherited. With `--supervised` it ends with us, however we end,
    unless it is stopped (SIGSTOP) then."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log: Path,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [str(KVRELAY), *arguments],
                cwd=directory,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE if "--supervised" in arguments else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                pass_fds=descriptors,
            )

    def wait_ready(self) -> dict[str, Any]:
        """Returns the line that the program prints when it serves."""
        assert self.process.stdout is not None
        has_line, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        assert has_line, f"it was not ready after {START_SECONDS} s:\n{self.log.read_text()}"
        line = self.process.stdout.readline()
        assert line, f"it ended before it was ready:\n{self.log.read_text()}"
        ready: dict[str, Any] = json.loads(line)
        return ready

    def wait_log(self, text: str) -> None:
        wait_until(lambda: text in self.log.read_text(), lambda: f"no {text!r} in\n{self.log.read_text()}")

    def interrupt(self) -> int:
        """Presses Ctrl-C and returns the exit status."""
        self.press_ctrl_c()
        return self.process.wait(PATIENCE_SECONDS)

    def press_ctrl_c(self) -> None:
        """Sends SIGINT to the whole process group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def program(
    *arguments: str,
    log: Path,
    directory: Path,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> Iterator[Program]:
    """Starts a program. At the end of the context kills it if it still runs, and closes its pipes."""
    running = Program(arguments, log=log, directory=directory, environment=environment, descriptors=descriptors)
    with running.process:
        try:
            yield running
        finally:
            running.process.kill()


def run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs `kvrelay ARGUMENTS` until it ends by itself."""
    return subprocess.run(
        [str(KVRELAY), *arguments],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
    )


def processes_of(model: Path) -> dict[int, list[str]]:
    """Returns the arguments of the running processes that name the model, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(model) in arguments:
            found[int(entry.name)] = arguments
    return found


def process_of(model: Path, module: str) -> int:
    """Returns the one process that runs this module."""
    [found] = [process for process, arguments in processes_of(model).items() if module in arguments]
    return found


def segments_of(model: Path) -> set[Path]:
    """Returns the shared-memory segments that processes of the model have mapped."""
    found = set()
    for process in processes_of(model):
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if Path(path).name.startswith("kvrelay-"):
                found.add(Path(path))
    return found


def wait_until(condition: Callable[[], bool], failure: Callable[[], str]) -> None:
    """Polls a condition that only the kernel or a scrape can tell; fails with `failure()` if it stays false."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, failure()
        time.sleep(0.02)


def wait_until_gone(model: Path) -> None:
    wait_until(lambda: not processes_of(model), lambda: f"still running: {processes_of(model)}")
