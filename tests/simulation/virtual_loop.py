"""An asyncio event loop whose time is virtual, and the processes that share it.

The loop never waits: when nothing is ready, time jumps to the next timer. A `Process` stands for one of the operating
system: its tasks and timers can be held back (SIGSTOP) or stopped for ever (SIGKILL). Invariant: the order in which
callbacks run is a function of the program alone, never of the machine's speed.
"""

import asyncio
import gc
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, cast
from weakref import WeakSet

_MOST_TURNS_AT_ONE_TIME = 50_000
_MOST_TURNS = 200_000
_MOST_CANCELLATIONS = 10
_END_SECONDS = 30.0

T = TypeVar("T")


class StuckError(Exception):
    """Nothing can happen any more, or the same moment never ends. The message lists the tasks."""


class Process:
    """A process: everything that runs in `context`, or in a copy of it, belongs to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.is_paused = False
        self.is_dead = False
        self._held: list[Any] = []  # handles
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.processes.append(self)
        self._loop = loop

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a function in this process, now. May only be called from outside of all processes."""
        return self.context.run(function, *args, **kwargs)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        """Runs what has become due meanwhile, in order."""
        self.is_paused = False
        if not self.is_dead:
            self._put_back()

    def kill(self) -> None:
        """Ends the process at once and without any clean-up."""
        self.is_dead = True

    def bury(self) -> None:
        """Lets the tasks of a dead process end like all others, because the run is over."""
        self.is_dead = self.is_paused = False
        self._put_back()

    def holds(self, handle: Any) -> bool:
        """Returns whether the loop must not run this handle now; keeps it if so."""
        if self.is_paused or self.is_dead:
            self._held.append(handle)
            return True
        return False

    def _put_back(self) -> None:
        held, self._held = self._held, []
        self._loop.put_back(held)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class VirtualClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. `errors`: what its exception handler was called with."""

    _ready: deque[Any]
    _scheduled: list[Any]
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.processes: list[Process] = []
        self._now = 0.0
        self._num_turns = 0
        self._moved_at = 0  # the turn in which time moved last
        self.set_exception_handler(lambda loop, context: self.errors.append(_describe(context)))
        self.set_task_factory(cast(Any, _make_task))  # typeshed's protocol is narrower than what a loop calls

    def time(self) -> float:
        return self._now

    def put_back(self, handles: list[Any]) -> None:
        self._ready.extend(handles)

    def end_all(self) -> None:
        """Cancels all tasks that are left, also those of dead processes, which would complain when they are
        collected."""
        for process in self.processes:
            process.bury()
        for _ in range(_MOST_CANCELLATIONS):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self._num_turns = self._moved_at = 0
            self.run_until_complete(asyncio.wait(tasks, timeout=_END_SECONDS))

    def _write_to_self(self) -> None:
        """Does nothing: there is no other thread, and no selector to wake."""

    def _process_events(self, event_list: Any) -> None:
        """Does nothing: there are no events."""

    def _run_once(self) -> None:
        """Runs what is ready, as BaseEventLoop does, with a jump in time where that one waits."""
        scheduled, ready = self._scheduled, self._ready
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False
        self._num_turns += 1
        if not ready and not self._stopping:
            if not scheduled:
                raise StuckError(f"nothing can happen any more; {self._tasks()}")
            if scheduled[0]._when > self._now:
                self._now, self._moved_at = scheduled[0]._when, self._num_turns
        if self._num_turns > min(_MOST_TURNS, self._moved_at + _MOST_TURNS_AT_ONE_TIME):
            raise StuckError(f"there is no end to it at {self._now:.6f}; {self._tasks()}")
        while scheduled and scheduled[0]._when <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is None or not process.holds(handle):
                handle._run()
            del handle  # a traceback may keep this frame, and by it the task

    def _tasks(self) -> str:
        return "tasks: " + ", ".join(sorted(describe_task(task) for task in asyncio.all_tasks(self)))


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Runs `main` on a loop of its own. Cyclic garbage is not collected meanwhile, because collecting it runs
    finalizers."""
    loop = VirtualLoop()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main(loop))
    finally:
        loop.end_all()
        asyncio.set_event_loop(None)
        loop.close()
        if was_enabled:
            gc.enable()


def describe_task(task: "asyncio.Task[Any]") -> str:
    coroutine = task.get_coro()
    return f"{task.get_name()} ({getattr(coroutine, '__qualname__', coroutine)})"


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], context: Context | None = None
) -> "asyncio.Task[T]":
    task = asyncio.Task(coroutine, loop=loop, context=context)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks.add(task)
    return task


def _describe(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context.get('message')}: {error!r}" if error is not None else str(context.get("message"))
