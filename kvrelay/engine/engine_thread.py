"""The engine's own thread. It alone touches the engine, steps while there is work, and runs messages between steps.

There are no locks. A step's result is handed to the loop when the layers of the next step begin, because these release
the interpreter; any earlier, the two threads would only wait for each other. Invariant: messages run in the order in
which they were posted, and results and answers to messages reach the loop in the order in which they were made. If the
answer to a message makes the loop post another one, a step lies between the two, except while the cores are left to
others: so what the first one changed is on the loop before the second one is answered.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvrelay.core.errors import UnavailableError
from kvrelay.engine.engine import Engine
from kvrelay.engine.loop_calls import LoopCalls
from kvrelay.engine.step_result import StepResult

_logger = logging.getLogger(__name__)
_IDLE_WAIT_SECONDS = 1.0  # an idle engine makes a turn this often; messages wake it at once
# A first token passes through the loop, the router and its client. While a step uses all cores, each of them waits
# for a time slice (docs/decisions.md, The wait for a first token). A lone request therefore yields the cores once.
_FIRST_TOKEN_SECONDS = 0.0015
# While prompts wait on another node of the machine, a node that only decodes leaves the cores to it after each step.
_MOST_STEPS_RESTED = 2  # it rests for so many times as long as the step took,
_LONGEST_TURN_SECONDS = 0.1  # but only until so long after the step began.
# After shorter steps it does not rest: such a model's prompts take little time, and a thread that wakes waits for a
# core.
_SHORTEST_STEP_SECONDS = 0.010

T = TypeVar("T")
Message = Callable[[Engine], None]


def should_yield_cores(engine: Engine, result: StepResult | None) -> bool:
    """Tells whether the next step should wait while a first token is delivered: the token belongs to the only request,
    that request continues, and steps use several cores."""
    return (
        result is not None
        and len(result.prompts) == 1
        and engine.threads.num_threads > 1
        and engine.serves_only(result.prompts[0].request_id)
    )


def seconds_to_rest(engine: Engine) -> float:
    """Returns how long to leave the cores to prompts that wait on another node, after a step that only decoded; 0 while
    a step is in flight, since somebody may wait for its first token."""
    step = engine.costs.newest_decode
    if engine.has_steps_in_flight or step < _SHORTEST_STEP_SECONDS or not engine.threads.prompts_wait_elsewhere():
        return 0.0
    return max(0.0, min(_MOST_STEPS_RESTED * step, _LONGEST_TURN_SECONDS - step))


class EngineThread:
    """The thread that owns an engine, and the messages to it.

    `on_result` and `on_crash` are called on `loop`. After a crash every `call` raises UnavailableError. `num_turns`
    grows with every turn of the thread, at least once a second even if there is nothing to do. `stream_interval` is how
    many seconds a result may be held back if nobody needs it at once (`StepResult.can_wait`).
    """

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        *,
        on_result: Callable[[StepResult], None],
        on_crash: Callable[[BaseException], None],
        stream_interval: float = 0.0,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._calls = LoopCalls(loop, stream_interval)
        self._on_result = on_result
        self._on_crash = on_crash
        self.num_turns = 0  # written by the thread, read by anyone
        self._mailbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._result: StepResult | None = None  # the last step's, until it is handed over
        self._stopped = threading.Event()
        self._pending: dict[asyncio.Future[Any], None] = {}  # used on the loop only, oldest first
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Tells whether the thread runs; after `stop`, whether it is still in its last step."""
        return self._thread.is_alive()

    def post(self, message: Message) -> None:
        """Runs `message`, which must not raise, on the engine thread between steps."""
        self._mailbox.put(message)

    def call(self, function: Callable[[Engine], T]) -> "asyncio.Future[T]":
        """Runs `function` on the engine thread between steps. The future gets what it returns or raises, and always
        resolves; if the engine ends first, with UnavailableError."""
        future: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(self._pending.pop)
        self._pending[future] = None

        def message(engine: Engine) -> None:
            try:
                value = function(engine)
            except Exception as error:
                self._to_loop(_reject, future, error)
            else:
                self._to_loop(_resolve, future, value)

        self.post(message)
        if self._stopped.is_set():
            self._fail_pending()
        return future

    async def stop(self, timeout: float) -> None:
        """Ends the thread after its current step, waiting for it at most `timeout` seconds."""
        self._mailbox.put(None)
        await asyncio.to_thread(self._thread.join, timeout)

    def _main(self) -> None:
        try:
            self._steps()
        except BaseException as error:
            _logger.exception("the engine crashed")
            self._hand_over()
            self._to_loop(self._on_crash, error)
        finally:
            self._stopped.set()
            self._to_loop(self._fail_pending)

    def _fail_pending(self) -> None:
        """Fails all pending calls. Runs on the loop, once the thread reads no more messages."""
        for future in list(self._pending):
            _reject(future, UnavailableError("the engine has stopped"))

    def _steps(self) -> None:
        busy, result = False, None
        while True:
            if should_yield_cores(self._engine, result):
                goes_on = self._yield_cores(_FIRST_TOKEN_SECONDS)
            elif busy and (seconds := seconds_to_rest(self._engine)) > 0.0:
                self._hand_over()
                self._engine.threads.rest()
                goes_on = self._yield_cores(seconds)
            else:
                goes_on = self._handle_messages(0.0 if busy else _IDLE_WAIT_SECONDS)
            if not goes_on:
                self._engine.settle()  # the memory that they use may be gone after this
                self._engine.threads.rest()
                return
            self.num_turns += 1
            result, busy = self._engine.step(self._hand_over)
            self._hand_over()  # the previous result, unless the step has called this already
            self._result = result
            if not busy or self._engine.has_steps_in_flight or (result is not None and result.prompts):
                self._hand_over()  # at once: a first token is more urgent than the next step

    def _yield_cores(self, seconds: float) -> bool:
        """Leaves the cores to others for a while, and handles messages meanwhile. Returns False if asked to stop."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._handle_messages(left):
                return False
        return True

    def _hand_over(self) -> None:
        if self._result is not None:
            self._to_loop(self._on_result, self._result, can_wait=self._result.can_wait)
            self._result = None

    def _handle_messages(self, seconds: float) -> bool:
        """Runs the messages in the mailbox, after waiting at most `seconds` for the first one. Messages that arrive
        meanwhile wait for the next turn. Returns False if asked to stop."""
        try:
            messages = [self._mailbox.get(timeout=seconds) if seconds else self._mailbox.get_nowait()]
        except queue.Empty:
            return True
        messages += [self._mailbox.get_nowait() for _ in range(self._mailbox.qsize())]
        self._hand_over()
        for message in messages:
            if message is None:
                return False
            message(self._engine)
        return True

    def _to_loop(self, function: Callable[..., None], *args: object, can_wait: bool = False) -> None:
        try:
            self._calls.add(function, *args, can_wait=can_wait)
        except RuntimeError:  # the loop is closed: the process is ending and nobody listens
            _logger.debug("dropped a result after the loop closed")


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
