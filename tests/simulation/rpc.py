"""The part of `grpc.aio` that our clients and servicers use, over the simulated network. Generated stubs, servicers and
the CallInterceptor run on it unchanged.

Invariant: a call ends exactly once at each end; at the client's end by a status, a loss, its deadline, or its own
cancellation.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import grpc

from kvrelay.core.rpc.calls import CallInterceptor
from tests.simulation.network import Connection, Network
from tests.simulation.virtual_loop import Process

Serialize = Callable[[Any], bytes]
Deserialize = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Status:
    code: grpc.StatusCode
    details: str = ""
    metadata: grpc.aio.Metadata = field(default_factory=grpc.aio.Metadata)


_OK = Status(grpc.StatusCode.OK)
_CANCELLED = Status(grpc.StatusCode.CANCELLED, "cancelled by the client")


class Server:
    """A stand-in for `grpc.aio.Server` in `add_XServicer_to_server`."""

    def __init__(self, process: Process, network: Network) -> None:
        self.process = process
        self.network = network
        self._handlers: dict[str, Any] = {}
        self._interceptor = CallInterceptor()
        self._calls: dict[ServerCall, None] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Ignores generic handlers: the registered ones are enough."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    async def handler(self, method: str) -> Any:
        """Returns None if there is no such method."""

        async def find(details: grpc.HandlerCallDetails) -> Any:
            return self._handlers.get(method)

        return await self._interceptor.intercept_service(find, cast("grpc.HandlerCallDetails", _CallDetails(method)))

    def open(self, call: "Call", request: bytes | None) -> None:
        server_call = ServerCall(self, call, request)
        call.servers.append(server_call)
        self._calls[server_call] = None

    def over(self, server_call: "ServerCall") -> None:
        self._calls.pop(server_call, None)

    async def stop(self) -> None:
        """Cancels all calls, as `stop(grace=0)` does."""
        calls = list(self._calls)
        for server_call in calls:
            server_call.lost()
        await asyncio.gather(*(server_call.task for server_call in calls), return_exceptions=True)
        self.network.died(self.process)


@dataclass(frozen=True, slots=True)
class _CallDetails:
    method: str
    invocation_metadata: tuple[()] = ()


class ServerCall:
    """The server's end of a call, which is its `ServicerContext`."""

    def __init__(self, server: Server, call: "Call", request: bytes | None) -> None:
        self._server = server
        self._call = call
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: no more will come
        if request is not None:
            self._requests.put_nowait(request)
        self._handler: Any = None
        self._is_over = False
        self._aborted: Status | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"serve {call.method}")

    # -- what arrives --------------------------------------------------------------------------------------------------

    def receive(self, request: bytes) -> None:
        self._requests.put_nowait(request)

    def half_close(self) -> None:
        self._requests.put_nowait(None)

    def lost(self) -> None:
        """Ends the call because the client is gone or has cancelled it."""
        if not self._is_over:
            self._is_over = True
            self.half_close()
            self.task.cancel()
            self._server.over(self)  # one that has not begun to run never ends

    # -- the servicer's context ----------------------------------------------------------------------------------------

    async def read(self) -> Any:
        """Returns a request as it came; those of streams come through an iterator."""
        data = await self._requests.get()
        return grpc.aio.EOF if data is None else data

    async def write(self, message: Any) -> None:
        if self._is_over:
            raise grpc.aio.UsageError("RPC already finished.")
        data = self._handler.response_serializer(message)
        self._send(partial(self._call.receive, data))
        await asyncio.sleep(0)

    def trailing_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[Any, ...]) -> None:
        self._aborted = Status(code, details, grpc.aio.Metadata(*trailing_metadata))
        raise grpc.aio.AbortError("Locally aborted.")

    # -- the call ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        status = _OK
        try:
            self._handler = await self._server.handler(self._call.method)
            if self._handler is None:
                status = Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            elif self._handler.stream_unary is not None:
                response = await self._handler.stream_unary(self._received(), self)
                data = self._handler.response_serializer(response)
                self._send(partial(self._call.receive_only, data))
                return
            else:
                await self._handler.stream_stream(self._received(), self)
        except grpc.aio.AbortError:
            assert self._aborted is not None
            status = self._aborted
        finally:
            self._server.over(self)
            was_over, self._is_over = self._is_over, True
        if not was_over:
            self._transmit("status", partial(self._call.end, status))

    async def _received(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            yield self._handler.request_deserializer(request)

    def _send(self, deliver: Callable[[], None]) -> None:
        if not self._is_over:
            self._transmit("response", deliver)

    def _transmit(self, kind: str, deliver: Callable[[], None]) -> None:
        connection = self._call.connection
        assert connection is not None
        connection.send(self._call, kind, to_server=False, deliver=deliver)


class Call:
    """The client's end of a call, awaited if it is unary, iterated over otherwise."""

    def __init__(
        self,
        channel: "Channel",
        method: str,
        deserialize: Deserialize,
        *,
        request: bytes | None,
        is_unary: bool,
        timeout: float | None,
    ) -> None:
        self.method = method
        self.message_class = (method, is_unary)
        self.servers: list[ServerCall] = []  # more than one when the request was duplicated
        self._deserialize = deserialize
        self._responses: deque[bytes] = deque()
        self._status: Status | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._sender: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        if timeout is not None:
            expired = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._deadline = self._loop.call_later(timeout, self._give_up, expired)
        self.connection: Connection | None = channel.connection()
        if self.connection is None:
            refused = Status(grpc.StatusCode.UNAVAILABLE, "failed to connect: connection refused")
            self._loop.call_later(channel.network.faults.delay(), self.end, refused)
            return
        self.connection.open(self)
        server = channel.server()
        if server is not None:  # else the connection is broken
            self.connection.send(self, "open", to_server=True, deliver=lambda: server.open(self, request))

    # -- as grpc.aio's -------------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Any:
        message = await self._read()
        if message is not None:
            return self._deserialize(message)
        self._raise_for_status()
        raise StopAsyncIteration

    def cancel(self) -> bool:
        return self._give_up(_CANCELLED)

    def send_all(self, requests: AsyncIterator[Any], serialize: Serialize) -> None:
        self._sender = self._loop.create_task(self._send_all(requests, serialize), name=f"send {self.method}")

    # -- what arrives --------------------------------------------------------------------------------------------------

    def receive(self, response: bytes) -> None:
        if self._status is None:
            self._responses.append(response)
            self._wake()

    def receive_only(self, response: bytes) -> None:
        """Takes the response of a unary call, which ends the call."""
        self.receive(response)
        self.end(_OK)

    def end(self, status: Status) -> None:
        """Ends the call with the server's status."""
        if self._status is not None:
            return
        if self.connection is not None:
            self.connection.forget(self)
        self._finish(status)

    def lost_at_client(self, reason: str) -> None:
        if self._status is None:
            self._finish(Status(grpc.StatusCode.UNAVAILABLE, reason))

    def lost_at_server(self) -> None:
        for server in self.servers:
            server.lost()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _give_up(self, status: Status) -> bool:
        """Ends the call and tells the server."""
        if self._status is not None:
            return False
        if self.connection is not None:
            self.connection.send(self, "cancel", to_server=True, deliver=self._cancelled_at_server)
        self._finish(status)
        return True

    def _finish(self, status: Status) -> None:
        self._status = status
        if self._deadline is not None:
            self._deadline.cancel()
        if self._sender is not None:
            self._sender.cancel()
        self._wake()

    def _cancelled_at_server(self) -> None:
        self.lost_at_server()
        assert self.connection is not None
        self.connection.forget(self)

    async def _only(self) -> Any:
        message = await self._read()
        if message is None:
            self._raise_for_status()
            raise AssertionError("a unary call without a response has a status")
        return self._deserialize(message)

    async def _read(self) -> bytes | None:
        """Returns the next response; None at the end."""
        while not self._responses:
            if self._status is not None:
                return None
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._responses.popleft()

    def _raise_for_status(self) -> None:
        assert self._status is not None
        if self._status is _CANCELLED:
            raise asyncio.CancelledError
        if self._status.code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                self._status.code, grpc.aio.Metadata(), self._status.metadata, details=self._status.details
            )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _send_all(self, requests: AsyncIterator[Any], serialize: Serialize) -> None:
        async for request in requests:
            if self.connection is not None:
                data = serialize(request)
                self.connection.send(self, "request", to_server=True, deliver=partial(self._arrive, data))
        if self.connection is not None:
            self.connection.send(self, "half_close", to_server=True, deliver=self._half_close)

    def _arrive(self, data: bytes) -> None:
        self.servers[0].receive(data)

    def _half_close(self) -> None:
        self.servers[0].half_close()


class Channel:
    """A channel from one process to one address. `servers`: the servers that listen now, by address."""

    def __init__(self, network: Network, servers: Mapping[str, Server], client: Process, address: str) -> None:
        self.network = network
        self._servers = servers
        self._client = client
        self._address = address
        self._connection: Connection | None = None

    def server(self) -> Server | None:
        return self._servers.get(self._address)

    def connection(self) -> Connection | None:
        """Returns None if no server listens there. A broken connection is used until this end knows of it."""
        if self._connection is not None and self._connection.broken and not self._connection.client_knows:
            return self._connection
        server = self.server()
        if server is None:
            return None
        if self._connection is None or self._connection.broken:
            self._connection = self.network.connect(self._client, server.process, self._address)
        return self._connection

    def unary_unary(
        self, method: str, request_serializer: Serialize, response_deserializer: Deserialize, **_: Any
    ) -> Callable[..., Call]:
        return partial(self._call, method, request_serializer, response_deserializer, True)

    def unary_stream(
        self, method: str, request_serializer: Serialize, response_deserializer: Deserialize, **_: Any
    ) -> Callable[..., Call]:
        return partial(self._call, method, request_serializer, response_deserializer, False)

    def stream_stream(
        self, method: str, request_serializer: Serialize, response_deserializer: Deserialize, **_: Any
    ) -> Callable[..., Call]:
        def start(requests: AsyncIterator[Any], *, timeout: float | None = None) -> Call:
            call = Call(self, method, response_deserializer, request=None, is_unary=False, timeout=timeout)
            call.send_all(requests, request_serializer)
            return call

        return start

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.break_("the channel was closed")

    def _call(
        self,
        method: str,
        serialize: Serialize,
        deserialize: Deserialize,
        is_unary: bool,
        request: Any,
        *,
        timeout: float | None = None,
    ) -> Call:
        return Call(self, method, deserialize, request=serialize(request), is_unary=is_unary, timeout=timeout)
