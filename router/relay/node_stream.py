"""One bidirectional stream to a node, which carries all requests that this router has there.

Invariant: every session gets its events in order. A stream that breaks ends all sessions that are still open, at once,
so none of them ever waits for a stream that is gone.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, Protocol, TypeVar

import grpc

from kvrelay.core.errors import KVRelayError, UnavailableError
from kvrelay.core.rpc.chunks import chunks
from kvrelay.core.rpc.connections import understood
from kvrelay.core.rpc.errors import error_from_rpc
from kvrelay.core.tasks import begin_task, end_tasks

_logger = logging.getLogger(__name__)

# Each event wakes the task of a request. After so many others have a turn: new connections, other nodes. If they take
# long, more events are handled at a time, so that streams go on at this rate when very many requests are refused.
_EVENTS_PER_TURN = 16
_EVENTS_PER_SECOND = 5_000
_MOST_EVENTS_PER_TURN = 128


class _Command(Protocol):
    """A command to a node, as it is sent."""

    def ByteSize(self) -> int: ...


class _Message(Protocol):
    """An event as it was received."""

    @property
    def request_id(self) -> str: ...


_MessageT = TypeVar("_MessageT", bound=_Message)
_MessageT_co = TypeVar("_MessageT_co", bound=_Message, covariant=True)
_CommandT = TypeVar("_CommandT", bound=_Command)
_CommandsT = TypeVar("_CommandsT")
_EventT = TypeVar("_EventT")


class _Update(Protocol[_MessageT_co]):
    """A message of a node."""

    @property
    def events(self) -> Iterable[_MessageT_co]: ...


class _Call(Protocol[_MessageT_co]):
    """A `Serve` call."""

    def __aiter__(self) -> AsyncIterator[_Update[_MessageT_co]]: ...

    def cancel(self) -> bool: ...


class NodeStream(Generic[_CommandT, _MessageT, _EventT]):
    """One `Serve` call, from its opening until it breaks. `name` is what logs and errors call the node.

    `message_of` makes a message to the node of the commands of one turn of the loop, or of those that were given while
    another message was being written.

    `event_from_wire` returns what a sink gets for a message, None if it is of a newer protocol, and raises KVRelayError
    if it breaks the protocol. `failed` makes the last event of a session from an error; `is_last` tells such events."""

    def __init__(
        self,
        serve: Callable[[AsyncIterator[_CommandsT]], _Call[_MessageT]],
        name: str,
        *,
        message_of: Callable[[list[_CommandT]], _CommandsT],
        event_from_wire: Callable[[_MessageT], _EventT | None],
        failed: Callable[[KVRelayError], _EventT],
        is_last: Callable[[_EventT], bool],
    ) -> None:
        self.broken = False
        self._name = name
        self._event_from_wire = event_from_wire
        self._failed = failed
        self._is_last = is_last
        self._sinks: dict[str, Callable[[_EventT], None]] = {}
        self._commands: list[_CommandT] = []  # to be sent
        self._wake = asyncio.Event()  # there are some, or there will be no more
        self._has_all_commands = False
        self._call = serve(self._outgoing(message_of))
        self._task = begin_task(self._read(), name=f"stream to {name}")

    def add(self, wire_id: str, sink: Callable[[_EventT], None]) -> None:
        assert wire_id not in self._sinks
        self._sinks[wire_id] = sink

    def remove(self, wire_id: str) -> bool:
        """Closes a session for further events. Returns whether it was still open."""
        return self._sinks.pop(wire_id, None) is not None

    def send(self, command: _CommandT) -> None:
        """Queues a command for the node; drops it if the stream has broken. The queue needs no bound, because a request
        sends a few commands and one for each chunk of its prefill, and the number of requests is bounded."""
        if not self.broken:
            self._commands.append(command)
            self._wake.set()

    def lose(self, error: KVRelayError) -> None:
        """Fails all sessions at once and cancels the call, so that the node, once it can, aborts their requests."""
        self._break(error)
        # Not the task that reads it: gRPC loses the memory of a message that has come and is not read any more.
        self._call.cancel()

    async def close(self, *, timeout: float = 0.0) -> None:
        """Ends the call, when the node has read all commands, but at most `timeout` seconds from now. Called when all
        sessions are closed."""
        self._end_commands()
        await asyncio.wait([self._task], timeout=timeout)
        await end_tasks(self._task)

    async def _outgoing(self, message_of: Callable[[list[_CommandT]], _CommandsT]) -> AsyncIterator[_CommandsT]:
        while self._commands or not self._has_all_commands:
            await self._wake.wait()
            self._wake.clear()
            commands, self._commands = self._commands, []
            for chunk in chunks(commands):
                yield message_of(chunk)

    def _end_commands(self) -> None:
        self._has_all_commands = True
        self._wake.set()

    async def _read(self) -> None:
        error: KVRelayError = UnavailableError(f"{self._name} has closed its stream")
        left = _EVENTS_PER_TURN
        try:
            async for update in self._call:
                for event in understood(update).events:
                    self._dispatch(event)
                    left -= 1
                    if left == 0:
                        began = time.monotonic()
                        await asyncio.sleep(0)
                        due = round((time.monotonic() - began) * _EVENTS_PER_SECOND)
                        left = min(max(_EVENTS_PER_TURN, due), _MOST_EVENTS_PER_TURN)
        except grpc.aio.AioRpcError as failure:
            error = UnavailableError(f"lost {self._name}: {error_from_rpc(failure)}")
        except UnavailableError as failure:
            error = UnavailableError(f"lost {self._name}: {failure}")
        finally:
            self._call.cancel()
            self._break(error)

    def _dispatch(self, message: _MessageT) -> None:
        sink = self._sinks.get(message.request_id)
        if sink is None:
            return  # the session was closed while this event was under way
        try:
            event = self._event_from_wire(message)
        except KVRelayError as failure:  # an answer that breaks the protocol: the node has still to be told to abort
            sink(self._failed(failure))
            return
        if event is None:
            return
        if self._is_last(event):
            self.remove(message.request_id)
        sink(event)

    def _break(self, error: KVRelayError) -> None:
        self.broken = True
        self._commands.clear()
        self._end_commands()  # gRPC leaves `_outgoing` waiting when a call ends by itself
        sinks, self._sinks = self._sinks, {}
        if sinks:
            _logger.warning("%s; %d requests were on it", error, len(sinks))
        for sink in sinks.values():
            sink(self._failed(error))
