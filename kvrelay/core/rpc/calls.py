"""How a gRPC server runs its calls: it bounds the waits for a request, and for a peer that takes no response, and turns
exceptions into statuses.

Invariant: an error of our tree leaves as `errors.py` beside this file describes it, any other exception as INTERNAL,
without its message.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, closing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from kvrelay.core.errors import DeadlineError, InvalidRequestError, KVRelayError
from kvrelay.core.rpc.errors import rich_status
from kvrelay.core.rpc.write_deadline import WRITE_SECONDS, WriteDeadline
from kvrelay.core.turns import OneAtATime

_logger = logging.getLogger(__name__)

# A call whose request has not arrived after so long is ended. The largest HTTP body of a router may take as long.
REQUEST_SECONDS = 180.0
# Larger ones, whose parsing and checking takes longer, are taken up one at a time.
LARGE_REQUEST_BYTES = 64 * 1024

Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic for the type checker only


_HANDLER_KINDS: dict[str, Callable[..., "Handler"]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """What runs the calls of a server, and the one place where a servicer's exceptions become statuses.

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
