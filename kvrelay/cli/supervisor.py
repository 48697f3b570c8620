"""Child processes of one local cluster: started, awaited until ready, started again when they end, ended in order.

What to start is data (`ChildCommand`); nothing here knows what a node is. A child reports that it serves by one JSON
line on its standard output, `{"event": "ready", ...}`; its standard error is passed on, each line under its name.
Invariant: no child outlives the supervisor. `stop` escalates to SIGKILL, and children end when their standard input is
closed, which the kernel does when the supervisor is killed.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from kvrelay.core.backoff import Backoff
from kvrelay.core.errors import KVRelayError
from kvrelay.core.process.standard_error import StandardError
from kvrelay.core.tasks import end_tasks

TAIL_LINES = 12
MAX_RESTARTS = 5  # in a row; a child that has served for a while begins anew
_SETTLED_SECONDS = 60.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.25, 8.0  # before a restart, doubled from one to the next
_HURRY_SECONDS = 3.0  # between a second signal and SIGKILL
_POLL_SECONDS = 0.2  # between two looks whether a child has ended whose pipes are still open
_MAX_LINE_BYTES = 1 << 16
# Below 3.12 asyncio starts a thread for each process, which can lack room as well.
_NO_PROCESS = (OSError, RuntimeError)
_LINE_END = re.compile(rb"[\r\n]+")  # progress bars rewrite their line with \r

ReadyLine = Mapping[str, object]
MakeSuccessor = Callable[["ChildCommand", ReadyLine], "ChildCommand"]
"""Returns the command of a child's successor, which has to answer where the first one did."""
OnEnd = Callable[["ChildCommand"], None]


class ChildFailedError(KVRelayError):
    """A child could not be started, has ended, or did not become ready in time; the message has its last lines."""


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """One process. `environment` is all that it gets; `descriptors` are the file descriptors that it inherits."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    descriptors: tuple[int, ...] = ()


class Child:
    """A running process. `ready` resolves with its ready line, `ended` with its exit status (negative: the signal)."""

    def __init__(
        self, command: ChildCommand, process: asyncio.subprocess.Process, on_line: Callable[[str, str], None]
    ) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.command = command
        self.process = process
        self.ready: asyncio.Future[ReadyLine] = asyncio.get_running_loop().create_future()
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._pumps = (
            asyncio.create_task(self._read_output(process.stdout)),
            asyncio.create_task(self._pass_on(process.stderr)),
        )
        self.ended = asyncio.create_task(self._wait())

    @property
    def tail(self) -> tuple[str, ...]:
        """Returns the last lines that it wrote."""
        return tuple(self._tail)

    def terminate(self) -> None:
        """Asks the child to end, and with it what it has started."""
        if self.process.returncode is None:
            self.process.terminate()

    def hurry(self) -> None:
        """Asks the child twice, with a signal and the end of its standard input, so that it ends without draining."""
        self.terminate()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        """Kills the child and everything in its process group, which is its own."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def _wait(self) -> int:
        status = await _exit_status(self.process)
        # A grandchild may hold the pipes open after the child is gone; what matters has been read by then.
        _, held = await asyncio.wait(self._pumps, timeout=1.0)
        for pump in held:
            pump.cancel()
        if held:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have left the group
                os.killpg(self.process.pid, signal.SIGKILL)
        return status

    async def _read_output(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            ready = _parse_ready(line)
            if ready is None:
                self._line(line)
            elif not self.ready.done():
                self.ready.set_result(ready)

    async def _pass_on(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            self._line(line)

    def _line(self, line: str) -> None:
        self._tail.append(line)
        self._on_line(self.command.name, line)


class Supervisor:
    """The owner of the children that it starts, as an async context manager: leaving it stops them all."""

    def __init__(self, *, stop_timeout: float, on_line: Callable[[str, str], None] | None = None) -> None:
        """Takes the seconds between SIGTERM and SIGKILL, and a function that gets a child's name and each of its
        lines."""
        self._stop_timeout = stop_timeout
        self._on_line = on_line or StandardError().write_from
        self._groups: list[list[Child]] = []

    async def __aenter__(self) -> "Supervisor":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(child for group in self._groups for child in group)

    async def start(self, commands: Sequence[ChildCommand], *, timeout: float) -> list[ReadyLine]:
        """Starts a group and returns the ready lines in the same order when all of it is ready. Raises ChildFailedError
        when one cannot be started or ends, or when `timeout` seconds have passed; what has been started is left to
        `stop`."""
        group: list[Child] = []
        self._groups.append(group)
        for command in commands:
            try:
                group.append(await self._spawn(command))
            except _NO_PROCESS as error:
                raise ChildFailedError(_start_report(command, error, "before the cluster was ready")) from error
        deadline = asyncio.get_running_loop().time() + timeout
        pending = list(group)
        while pending:
            waits = {wait for child in pending for wait in (child.ready, child.ended)}
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for child in group:
                if child.ended.done():
                    raise ChildFailedError(_exit_report(child, "before the cluster was ready"))
            pending = [child for child in pending if not child.ready.done()]
            if not done and pending:
                names = ", ".join(child.command.name for child in pending)
                raise ChildFailedError(
                    f"not ready after {timeout:g} seconds: {names}; a larger --start-timeout allows more"
                )
        return [child.ready.result() for child in group]

    async def keep(
        self,
        *,
        make_successor: MakeSuccessor,
        timeout: float,
        on_event: Callable[[str], None],
        on_end: OnEnd = lambda command: None,
    ) -> NoReturn:
        """Starts every child again that ends, with growing waits; a successor has `timeout` seconds to be ready.
        Calls `on_end` when a child has ended, and `on_event` with a sentence for each end and each return. Raises
        ChildFailedError when a child has ended, or could not be started, too often in a row."""
        keepers = [
            asyncio.create_task(
                self._keep(child, make_successor, timeout, on_event, on_end), name=f"keep {child.command.name}"
            )
            for child in self.children
        ]
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            for keeper in done:
                await keeper
            raise AssertionError("a keeper ends only by an error")
        finally:
            await end_tasks(*keepers)

    async def _keep(
        self,
        child: Child,
        make_successor: MakeSuccessor,
        timeout: float,
        on_event: Callable[[str], None],
        on_end: OnEnd,
    ) -> NoReturn:
        clock = asyncio.get_running_loop().time
        command = make_successor(child.command, child.ready.result())
        num_restarts = 0
        backoff = Backoff(first=_FIRST_WAIT_SECONDS, longest=_LONGEST_WAIT_SECONDS, jitter=0.0)
        serves_since = clock()
        report = partial(_exit_report, child)
        while True:
            await asyncio.wait({child.ended})
            on_end(command)
            if clock() - serves_since >= _SETTLED_SECONDS:
                num_restarts = 0
                backoff.reset()
            if num_restarts == MAX_RESTARTS:
                raise ChildFailedError(report(f"again, after {MAX_RESTARTS} restarts"))
            wait = backoff.next()
            on_event(report(f"and is started again in {wait:g} s"))
            await asyncio.sleep(wait)
            num_restarts += 1
            serves_since = clock()
            try:
                child = await self._replace(child, command)
            except _NO_PROCESS as error:  # a start that failed
                report = partial(_start_report, command, error)
                continue
            report = partial(_exit_report, child)
            waits: set[asyncio.Future[Any]] = {child.ready, child.ended}
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            serves_since = clock()
            if child.ready.done():
                on_event(f"{command.name} serves again.")
            elif not child.ended.done():
                child.kill()
                report = partial(_report, child, f"was not ready after {timeout:g} s (--start-timeout)")

    async def _replace(self, child: Child, command: ChildCommand) -> Child:
        successor = await self._spawn(command)
        for group in self._groups:
            if child in group:
                group[group.index(child)] = successor
        return successor

    async def stop(self) -> None:
        """Ends the groups, the last one first, with SIGTERM and after the stop timeout SIGKILL. May be called again. If
        it is cancelled while it waits (a second Ctrl-C), it hurries what is left, and soon kills it; if it is cancelled
        again, at once. A node that is killed leaves its pool in shared memory."""
        try:
            for group in reversed(self._groups):
                for child in group:
                    child.terminate()
                await _ended(group, timeout=self._stop_timeout)
                await _kill(group)
        finally:
            try:
                for child in self.children:
                    child.hurry()
                await _ended(self.children, timeout=_HURRY_SECONDS)
            finally:
                await _kill(self.children)

    async def _spawn(self, command: ChildCommand) -> Child:
        process = await asyncio.create_subprocess_exec(
            *command.arguments,
            stdin=asyncio.subprocess.PIPE,  # never written: its end tells the child that we are gone
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(command.environment),
            pass_fds=command.descriptors,
            start_new_session=True,  # a terminal's Ctrl-C reaches only us, so that the order of ending is ours
        )
        return Child(command, process, self._on_line)


async def _exit_status(process: asyncio.subprocess.Process) -> int:
    """Returns the exit status once the process has ended. `Process.wait` alone may also wait for its pipes to be closed
    (Python 3.11), which a grandchild may hold."""
    waiting = asyncio.ensure_future(process.wait())
    while process.returncode is None:
        await asyncio.wait({waiting}, timeout=_POLL_SECONDS)
    waiting.cancel()
    return process.returncode


async def _kill(children: Iterable[Child]) -> None:
    for child in children:
        child.kill()
    await _ended(children)


async def _ended(children: Iterable[Child], *, timeout: float | None = None) -> None:
    """Returns when all of them have ended, or after `timeout` seconds."""
    if left := {child.ended for child in children if not child.ended.done()}:
        await asyncio.wait(left, timeout=timeout)


def _exit_report(child: Child, circumstance: str) -> str:
    status = child.ended.result()
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    return _report(child, how, circumstance)


def _report(child: Child, how: str, circumstance: str) -> str:
    lines = "".join(f"\n    {line}" for line in child.tail)
    return f"{child.command.name} {how} {circumstance}." + (f" Its last lines:{lines}" if lines else "")


def _start_report(command: ChildCommand, error: Exception, circumstance: str) -> str:
    return f"{command.name} could not be started ({error}) {circumstance}."


def _parse_ready(line: str) -> ReadyLine | None:
    if not line.startswith("{"):
        return None
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.get("event") == "ready" else None


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yields lines without their ends. Blank ones are dropped, and very long ones are cut into pieces."""
    rest = b""
    while chunk := await stream.read(_MAX_LINE_BYTES):
        *lines, rest = _LINE_END.split(rest + chunk)
        if len(rest) >= _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in filter(None, lines):
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
