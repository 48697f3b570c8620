"""gRPC as every process uses it: one set of options, one interceptor that maps errors, health and reflection.

Invariant: an error of our tree leaves a service as a status code, a message and rich details (google.rpc), and becomes
the same class again on the other side. Any other exception leaves as INTERNAL, without its message.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, closing
from typing import Any, TypeAlias

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from kvrelay.core.errors import (
    CancelledByPeerError,
    ConfigurationError,
    ContextLengthError,
    DeadlineError,
    GivenUpError,
    InvalidRequestError,
    KVError,
    KVRelayError,
    ModelLoadError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
    error_of_code,
    status_of,
)
from kvrelay.core.health_service import HealthService
from kvrelay.core.listening import address_of, check_port
from kvrelay.core.turns import OneAtATime
from kvrelay.core.write_deadline import WriteDeadline

_logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
PING_TIMEOUT_MS = 60_000  # gRPC waits so long for the answer to a ping, whatever the keepalive's timeout is
FLOW_WINDOW_BYTES = 1024 * 1024
# Calls that have arrived and that the loop has not looked at yet. gRPC cancels further ones, by default some of those
# beyond a thousand, and the client cannot tell why; a router refuses what is too much for it in its own words.
MAX_PENDING_CALLS = 10_000
RECONNECT_SECONDS = 0.5  # longest wait between two attempts to reach a process: requests may wait for it
CONNECT_SECONDS = 2.0  # longest attempt: it takes two round trips, maybe to a host that is busy
RETRY_DELAY_SECONDS = 1
ERROR_DOMAIN = "kvrelay"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARS = 512
# A peer that takes nothing from its stream for so long counts as gone; until then its stream keeps its resources.
WRITE_SECONDS = 60.0
# A call whose request has not arrived after so long is ended. The largest HTTP body of a router may take as long.
REQUEST_SECONDS = 180.0
# Larger ones, whose parsing and checking takes longer, are taken up one at a time.
LARGE_REQUEST_BYTES = 64 * 1024
WHOLE_SERVER = ""  # the health service's name for the server as a whole, which serves while the process works

Options = list[tuple[str, int]]

# For a channel to a node or a router, which is reached directly, whatever the host's proxy settings say.
WITHOUT_PROXY: Options = [("grpc.enable_http_proxy", 0)]

# ErrorInfo.reason on the wire: it names the error's class, which the status code alone does not always determine.
_REASONS: dict[str, type[KVRelayError]] = {
    "INTERNAL": KVRelayError,
    "INVALID_REQUEST": InvalidRequestError,
    "CONTEXT_LENGTH": ContextLengthError,
    "UNKNOWN_MODEL": UnknownModelError,
    "CONFIGURATION": ConfigurationError,
    "MODEL_LOAD": ModelLoadError,
    "KV": KVError,
    "CANCELLED": CancelledByPeerError,
    "DEADLINE": DeadlineError,
    "GIVEN_UP": GivenUpError,
    "OVERLOADED": OverloadedError,
    "UNAVAILABLE": UnavailableError,
}
_REASON_OF = {cls: reason for reason, cls in _REASONS.items()}


def _shared_options(max_receive_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # The window is large enough for a burst of steps at first, and grows with the measured bandwidth-delay product.
        ("grpc.http2.lookahead_bytes", FLOW_WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 1),
    ]


def channel_options() -> Options:
    """Returns the options for `grpc.aio.insecure_channel`. With them, a restarted process is found about
    `RECONNECT_SECONDS` later, and one that has another IP address under its name two seconds after the name says so.
    A connection over which nothing comes any more is given up after 15 seconds at most, and made anew."""
    return [
        *_shared_options(),
        *WITHOUT_PROXY,
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(CONNECT_SECONDS * 1e3)),  # how long an attempt may take, in truth
        ("grpc.max_reconnect_backoff_ms", round(RECONNECT_SECONDS * 1e3)),
        ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    ]


def server_options(*, max_request_bytes: int = MAX_MESSAGE_BYTES, ping_timeout_ms: int = PING_TIMEOUT_MS) -> Options:
    """Returns the options for `grpc.aio.server`. A peer that answers no ping for `ping_timeout_ms` loses its calls:
    one that is stopped, or that the network does not reach any more. Ports are not shared: two servers on one port
    would split a cluster unnoticed."""
    return [
        *_shared_options(max_request_bytes),
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.so_reuseport", 0),
    ]


async def serve_insecure(server: grpc.aio.Server, host: str, port: int, *, flag: str = "--port") -> int:
    """Binds the server (port 0 draws a free one), starts it, and returns the bound port. `flag` is the flag that sets
    the port. Raises ConfigurationError if the port cannot be bound."""
    check_port(host, port, flag=flag)  # gRPC would not say why it cannot, and write to standard error
    address = address_of(host, port)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error}; choose another port with {flag}") from error
    await server.start()
    return bound


def add_health_and_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> HealthService:
    """Adds the standard health and reflection services. The server as a whole ("") is SERVING from the start."""
    servicer = HealthService()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return servicer


async def set_serving(servicer: HealthService, service_names: Iterable[str], *, serving: bool) -> None:
    """Reports each service as SERVING or NOT_SERVING; the name of the server as a whole is `WHOLE_SERVER`."""
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in service_names:
        await servicer.set(name, status)


def rich_status(error: KVRelayError) -> Any:
    """Returns `error` as a google.rpc.Status, always with ErrorInfo, with BadRequest if a field is named, and with
    RetryInfo if trying again may help.

    The message is cut so that it fits HTTP/2 trailers in any script.
    """
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=_reason_of(error), domain=ERROR_DOMAIN)]
    message = str(error)[:MAX_MESSAGE_CHARS]
    if isinstance(error, InvalidRequestError) and error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, OverloadedError | UnavailableError):
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=RETRY_DELAY_SECONDS)))
    packed = [AnyMessage() for _ in details]
    for slot, detail in zip(packed, details, strict=True):
        slot.Pack(detail)
    code = status_of(error).grpc_code.value[0]
    return status_pb2.Status(code=code, message=message, details=packed)


def error_from_rpc(error: grpc.aio.AioRpcError) -> KVRelayError:
    """Returns the error that a peer or the transport has reported, as an exception of our own tree, with the field that
    it names."""
    message = error.details() or error.code().name
    reason, field = _details_of(error)
    cls = _REASONS.get(reason)
    if cls is None:
        return error_of_code(error.code(), message)
    if issubclass(cls, InvalidRequestError):
        return cls(message, field=field)
    return cls(message)


def _reason_of(error: KVRelayError) -> str:
    return next(_REASON_OF[cls] for cls in type(error).__mro__ if cls in _REASON_OF)


def _details_of(error: grpc.aio.AioRpcError) -> tuple[str, str | None]:
    """Returns the reason ("" if the peer is not of kvrelay) and the field. Details that cannot be parsed are
    ignored."""
    encoded = next((value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY), None)
    if not isinstance(encoded, bytes):
        return "", None
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    try:
        for detail in status_pb2.Status.FromString(encoded).details:
            detail.Unpack(info)
            detail.Unpack(bad_request)
    except DecodeError:
        return "", None
    field = bad_request.field_violations[0].field if bad_request.field_violations else None
    return (info.reason if info.domain == ERROR_DOMAIN else ""), field


Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic for the type checker only


_HANDLER_KINDS: dict[str, Callable[..., "Handler"]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """The one place where a servicer's exceptions become statuses.

    Cancellation passes through. The generator of a stream is closed together with its call, or after the other side has
    taken nothing for `write_timeout` seconds. A call that takes one request ends with DeadlineError if that has not
    arrived after `request_timeout` seconds. Of large requests that have come together, each begins in a turn of the
    event loop of its own.
    """

    def __init__(self, *, write_timeout: float = WRITE_SECONDS, request_timeout: float = REQUEST_SECONDS) -> None:
        self._write_timeout = write_timeout
        self._request_timeout = request_timeout
        self._large_requests = OneAtATime()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        for kind, make in _HANDLER_KINDS.items():
            behavior: Behavior | None = getattr(handler, kind)
            if behavior is not None:
                coroutine = (
                    _written(behavior, self._write_timeout) if inspect.isasyncgenfunction(behavior) else behavior
                )
                deserializer = handler.request_deserializer
                if kind.startswith("unary_") and deserializer is not None:
                    coroutine = _received(coroutine, deserializer, self._request_timeout, self._large_requests)
                    deserializer = None
                    make = _HANDLER_KINDS[kind.replace("unary_", "stream_", 1)]  # the same on the wire
                guarded = _guarded(coroutine, handler_call_details.method)
                return make(guarded, deserializer, handler.response_serializer)
        return handler


def _written(behavior: Callable[[Any, Context], AsyncGenerator[Any, None]], timeout: float) -> Behavior:
    """Turns a generator into a coroutine that writes its responses. A cancelled call, or a write that takes longer than
    `timeout` seconds, closes the generator at once and in the same task."""

    async def write_all(request: Any | AsyncIterator[Any], context: Context) -> None:
        responses = behavior(request, context)
        del request  # of maybe megabytes: the responses may take minutes
        with closing(WriteDeadline(timeout)) as deadline:
            async with aclosing(responses):
                async for response in responses:
                    with deadline:
                        await context.write(response)

    return write_all


def _received(
    behavior: Behavior, deserialize: Callable[[bytes], Any], timeout: float, large_requests: OneAtATime
) -> Behavior:
    """Reads and parses the one request here. gRPC itself would wait for it for ever, keep it as long as the call takes,
    and report an invalid one as a failure of the server."""

    async def read(context: Context) -> Any:
        try:
            async with asyncio.timeout(timeout):
                data = await context.read()
        except TimeoutError:
            raise DeadlineError(f"the request did not arrive within {timeout:g} s") from None
        if data is grpc.aio.EOF:
            raise InvalidRequestError("the call has no request")
        if len(data) > LARGE_REQUEST_BYTES:
            await large_requests.turn()
        return deserialize(data)

    async def call(_: AsyncIterator[bytes], context: Context) -> Any:
        return await behavior(await read(context), context)

    return call


def _guarded(behavior: Behavior, method: str) -> Behavior:
    async def call(request: Any | AsyncIterator[Any], context: Context) -> Any:
        try:
            return await behavior(request, context)
        except KVRelayError as error:
            status = rich_status(error)
        except DecodeError:  # here for streams of requests, too, which gRPC parses when they are read
            status = rich_status(InvalidRequestError("the request is not the protobuf message that this method takes"))
        except grpc.aio.BaseError:
            raise  # the servicer or gRPC has already ended the call
        except Exception:
            _logger.exception("%s failed", method)
            status = rich_status(KVRelayError("internal error"))
        # Not in a handler: gRPC keeps the error that this raises until a collection of garbage, with its context.
        error_status = rpc_status.to_status(status)
        metadata = (*context.trailing_metadata(), *error_status.trailing_metadata)  # that of the servicer as well
        return await context.abort(error_status.code, error_status.details, metadata)

    return call
