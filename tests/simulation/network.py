"""The simulated network: connections that carry the messages of calls late, never, twice, or up to some point.

Invariant: the messages of one call in one direction arrive in order or not at all. Nothing arrives over a broken
connection, and both of its ends notice that it broke, though not at the same time.
"""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

from tests.simulation.virtual_loop import Process

_ORDER_SECONDS = 1e-6  # between two messages that must stay in order
_KEEPALIVE_SECONDS = 15.0  # until an end notices that nothing comes through: `kvrelay.core.rpc.connections`


class Fate(Enum):
    """What happens to a message."""

    DELIVER = "deliver"
    LOSE = "lose"  # the connection breaks before it arrives
    DELIVER_AND_BREAK = "deliver_and_break"  # it takes effect, then the connection breaks
    RESET = "reset"  # its call alone breaks before it arrives
    DELIVER_AND_RESET = "deliver_and_reset"
    HANG = "hang"  # from it on nothing comes through, until keepalive breaks the connection
    DUPLICATE = "duplicate"  # of a unary request: it arrives twice


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a call. `kind` is open, request, half_close, response, status or cancel."""

    method: str
    kind: str
    is_unary: bool


class NetworkFaults(Protocol):
    def fate(self, message: Message) -> Fate: ...

    def delay(self) -> float:
        """Returns the seconds that a message travels."""
        ...

    def notice(self) -> float:
        """Returns the seconds until an end of a broken connection notices it."""
        ...


class CallEnds(Protocol):
    """Both ends of one call. Each method runs in the process of its end."""

    message_class: tuple[str, bool]  # method, whether it is unary

    def lost_at_client(self, reason: str) -> None: ...

    def lost_at_server(self) -> None: ...


class Network:
    """All connections. `trace` is called with what happens."""

    def __init__(self, faults: NetworkFaults, trace: Callable[[str], None]) -> None:
        self.faults = faults
        self.trace = trace
        self.loop = asyncio.get_running_loop()
        self.context = copy_context()  # of no process: what the network does by itself
        self.connections: list[Connection] = []
        self._cut_off: dict[str, int] = {}  # addresses, and by how many partitions

    def connect(self, client: Process, server: Process, address: str) -> "Connection":
        connection = Connection(self, client, server, address)
        self.connections.append(connection)
        if address in self._cut_off or server.is_paused:
            connection.expect_keepalive()
        if address in self._cut_off:
            connection.block()
        return connection

    def partition(self, address: str, seconds: float) -> None:
        """Holds up all messages to and from a server for a while."""
        self._cut_off[address] = self._cut_off.get(address, 0) + 1
        for connection in self._of(address):
            connection.block()
        self.loop.call_later(seconds, self._heal, address, context=self.context)

    def paused(self, process: Process) -> None:
        """Lets the peers of a process that answers nothing notice it by keepalive, if that lasts."""
        for connection in self.connections:
            if process in (connection.client, connection.server):
                connection.expect_keepalive()

    def died(self, process: Process) -> None:
        for connection in list(self.connections):
            if process in (connection.client, connection.server):
                connection.break_("the peer is gone")

    def cut(self, address: str) -> None:
        for connection in self._of(address):
            connection.break_("the connection was reset")

    def is_cut_off(self, address: str) -> bool:
        return address in self._cut_off

    def _of(self, address: str) -> "list[Connection]":
        return [connection for connection in self.connections if connection.address == address]

    def _heal(self, address: str) -> None:
        self._cut_off[address] -= 1
        if not self._cut_off[address]:
            del self._cut_off[address]
            for connection in self._of(address):
                connection.unblock()


class Connection:
    """A connection between one channel and one server, which carries any number of calls. Until `client_knows` that it
    is broken, the client sends its calls over it, in vain."""

    def __init__(self, network: Network, client: Process, server: Process, address: str) -> None:
        self.client = client
        self.server = server
        self.address = address
        self.broken = False
        self.client_knows = False
        self._network = network
        self._blocked = False
        self._held: list[Callable[[], None]] = []
        self._calls: dict[CallEnds, dict[bool, float]] = {}  # when the last message arrives, by direction

    def open(self, call: CallEnds) -> None:
        self._calls[call] = {True: 0.0, False: 0.0}

    def forget(self, call: CallEnds) -> None:
        """Removes a call of which both ends are over."""
        self._calls.pop(call, None)

    def send(self, call: CallEnds, kind: str, *, to_server: bool, deliver: Callable[[], None]) -> None:
        """Sends a message. `deliver` runs at the receiver, if the message arrives."""
        if self.broken or call not in self._calls:
            return
        method, is_unary = call.message_class
        fate = self._network.faults.fate(Message(method, kind, is_unary))
        if fate is not Fate.DELIVER:
            self._network.trace(f"network {self.address} {method} {kind}: {fate.value}")
        transmit = partial(self._transmit, call, to_server)
        match fate:
            case Fate.LOSE:
                self.break_("the connection was reset")
            case Fate.RESET:
                self._reset(call)
            case Fate.HANG:
                self.block()
                self.expect_keepalive()
                transmit(deliver)
            case Fate.DELIVER_AND_BREAK:
                transmit(partial(self._and_then, deliver, partial(self.break_, "the connection was reset")))
            case Fate.DELIVER_AND_RESET:
                transmit(partial(self._and_then, deliver, partial(self._reset, call)))
            case Fate.DUPLICATE:
                transmit(deliver)
                transmit(deliver)
            case Fate.DELIVER:
                transmit(deliver)

    def break_(self, reason: str) -> None:
        if self.broken:
            return
        self.broken = True
        self._network.trace(f"network {self.address}: {reason}")
        self._network.connections.remove(self)
        calls, self._calls = list(self._calls), {}
        self._held.clear()
        self._break_calls(calls, reason, then=partial(self._noticed, reason))

    def block(self) -> None:
        """Holds up all messages until `unblock`. They are not lost unless the connection breaks meanwhile."""
        if not self._blocked:
            self._blocked = True
            self.expect_keepalive()

    def unblock(self) -> None:
        self._blocked = False
        held, self._held = self._held, []
        for transmit in held:
            transmit()

    def expect_keepalive(self) -> None:
        """Breaks the connection if it does not work in a while."""
        self._network.loop.call_later(_KEEPALIVE_SECONDS, self._check_alive, context=self._network.context)

    def _check_alive(self) -> None:
        if self._blocked or self.client.is_paused or self.server.is_paused:
            self.break_("keepalive timed out")

    def _transmit(self, call: CallEnds, to_server: bool, deliver: Callable[[], None]) -> None:
        if self._blocked:
            self._held.append(partial(self._transmit, call, to_server, deliver))
            return
        if call not in self._calls:
            return
        loop, arrivals = self._network.loop, self._calls[call]
        arrivals[to_server] = max(loop.time() + self._network.faults.delay(), arrivals[to_server] + _ORDER_SECONDS)
        receiver = self.server if to_server else self.client
        loop.call_at(arrivals[to_server], self._arrive, call, deliver, context=receiver.context)

    def _arrive(self, call: CallEnds, deliver: Callable[[], None]) -> None:
        if call in self._calls:
            deliver()

    def _and_then(self, deliver: Callable[[], None], fail: Callable[[], None]) -> None:
        """Delivers, and fails a moment later, when the message has had an effect."""
        deliver()
        self._network.loop.call_later(self._network.faults.delay(), fail, context=self._network.context)

    def _reset(self, call: CallEnds) -> None:
        if self._calls.pop(call, None) is not None:
            self._break_calls([call], "the stream was reset")

    def _noticed(self, reason: str) -> None:
        """Ends the calls that the client has sent since the connection broke."""
        self.client_knows = True
        for call in self._calls:
            call.lost_at_client(reason)

    def _break_calls(self, calls: list[CallEnds], reason: str, *, then: Callable[[], None] = lambda: None) -> None:
        def at_client() -> None:
            for call in calls:
                call.lost_at_client(reason)
            then()

        def at_server() -> None:
            for call in calls:
                call.lost_at_server()

        loop, faults = self._network.loop, self._network.faults
        loop.call_later(faults.notice(), at_client, context=self.client.context)
        loop.call_later(faults.notice(), at_server, context=self.server.context)
