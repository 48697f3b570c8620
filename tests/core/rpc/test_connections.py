"""Errors cross a real gRPC connection and keep their class; streams end with their calls."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvrelay.core.errors import (
    CancelledByPeerError,
    ConfigurationError,
    DeadlineError,
    GivenUpError,
    InvalidRequestError,
    KVError,
    KVRelayError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)
from kvrelay.core.rpc.calls import CallInterceptor
from kvrelay.core.rpc.connections import (
    RECONNECT_SECONDS,
    WHOLE_SERVER,
    add_health_and_reflection,
    channel_options,
    serve_insecure,
    server_options,
    set_serving,
)
from kvrelay.core.rpc.errors import DETAILS_KEY, error_from_rpc, rich_status
from kvrelay.v1 import decode_node_pb2, decode_node_pb2_grpc, router_pb2, router_pb2_grpc


class FailingRouter(router_pb2_grpc.RouterServicer):
    """A router that yields one message and then raises the given error, or waits for ever if that is None."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.closed = asyncio.Event()

    async def Generate(self, request: router_pb2.GenerateRequest, context: object) -> router_pb2.GenerateResponse:
        assert self._error is not None
        raise self._error

    async def GenerateStream(
        self, request: router_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        try:
            yield router_pb2.GenerateResponse(request_id="first")
            if self._error is not None:
                raise self._error
            await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def Tokenize(self, request: object, context: object) -> router_pb2.TokenizeResponse:
        raise NotImplementedError

    async def Detokenize(self, request: object, context: object) -> router_pb2.DetokenizeResponse:
        raise NotImplementedError

    async def ListModels(self, request: object, context: object) -> router_pb2.ListModelsResponse:
        raise NotImplementedError

    async def Abort(self, request: object, context: object) -> router_pb2.AbortResponse:
        raise NotImplementedError


class EchoDecode(decode_node_pb2_grpc.DecodeNodeServicer):
    async def Serve(
        self, request_iterator: AsyncIterator[object], context: object
    ) -> AsyncIterator[decode_node_pb2.DecodeUpdate]:
        async for _ in request_iterator:
            yield decode_node_pb2.DecodeUpdate()
            raise OverloadedError("full")


@asynccontextmanager
async def serving(servicer: FailingRouter) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[CallInterceptor()], options=server_options())
    router_pb2_grpc.add_RouterServicer_to_server(servicer, server)
    decode_node_pb2_grpc.add_DecodeNodeServicer_to_server(EchoDecode(), server)
    health = add_health_and_reflection(server, ["kvrelay.v1.Router"])
    await set_serving(health, [WHOLE_SERVER, "kvrelay.v1.Router"], serving=True)
    port = await serve_insecure(server, "127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            yield channel
    finally:
        await server.stop(None)


def router_stub(channel: grpc.aio.Channel) -> "router_pb2_grpc.RouterAsyncStub":
    return cast("router_pb2_grpc.RouterAsyncStub", router_pb2_grpc.RouterStub(channel))


def foreign_details() -> bytes:
    """Returns the details of an error of another system, whose reason has the name of one of ours."""
    status = status_pb2.Status(details=[AnyMessage()])
    status.details[0].Pack(error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="somebody.else"))
    encoded: bytes = status.SerializeToString()
    return encoded


async def raised_by_generate(error: Exception) -> tuple[grpc.aio.AioRpcError, KVRelayError]:
    async with serving(FailingRouter(error)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router_stub(channel).Generate(router_pb2.GenerateRequest(), wait_for_ready=True)
        return caught.value, error_from_rpc(caught.value)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("temperature is wrong", field="temperature"), grpc.StatusCode.INVALID_ARGUMENT),
        (InvalidRequestError("all wrong"), grpc.StatusCode.INVALID_ARGUMENT),
        (UnknownModelError("no such model", field="model"), grpc.StatusCode.NOT_FOUND),
        (DeadlineError("too slow"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (OverloadedError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (UnavailableError("nobody"), grpc.StatusCode.UNAVAILABLE),
        (CancelledByPeerError("gone"), grpc.StatusCode.CANCELLED),
        (KVError("bad digest"), grpc.StatusCode.INTERNAL),
        (GivenUpError("nodes ended"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_an_error_comes_back_as_itself(error: KVRelayError, code: grpc.StatusCode) -> None:
    rpc_error, restored = await raised_by_generate(error)
    assert rpc_error.code() is code
    assert type(restored) is type(error)
    assert str(restored) == str(error)
    assert getattr(restored, "field", None) == getattr(error, "field", None)
    details = {detail.TypeName() for detail in rich_status(error).details}
    assert ("google.rpc.RetryInfo" in details) is isinstance(error, OverloadedError | UnavailableError)


async def test_a_foreign_exception_is_internal_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="kvrelay.core.rpc.calls"):
        rpc_error, restored = await raised_by_generate(ZeroDivisionError("secret detail"))
    assert rpc_error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(restored)
    assert any(record.exc_info for record in caplog.records)


async def test_a_very_long_message_is_cut_instead_of_breaking_the_connection() -> None:
    _, restored = await raised_by_generate(InvalidRequestError("漢" * 100_000, field="prompt"))
    assert isinstance(restored, InvalidRequestError)
    assert restored.field == "prompt"
    assert set(str(restored)) == {"漢"}


async def test_no_proxy_is_between_nodes_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    _, restored = await raised_by_generate(OverloadedError("full"))
    assert type(restored) is OverloadedError


async def test_an_error_in_the_middle_of_a_stream_keeps_its_class() -> None:
    servicer = FailingRouter(KVError("lost"))
    async with serving(servicer) as channel:
        call = router_stub(channel).GenerateStream(router_pb2.GenerateRequest())
        messages = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for message in call:
                messages.append(message.request_id)
    assert messages == ["first"]
    assert isinstance(error_from_rpc(caught.value), KVError)


async def test_an_error_in_a_bidirectional_stream_keeps_its_status() -> None:
    async with serving(FailingRouter(None)) as channel:
        stub = cast("decode_node_pb2_grpc.DecodeNodeAsyncStub", decode_node_pb2_grpc.DecodeNodeStub(channel))
        call = stub.Serve()
        await call.write(decode_node_pb2.DecodeCommands())
        assert isinstance(await call.read(), decode_node_pb2.DecodeUpdate)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert isinstance(error_from_rpc(caught.value), OverloadedError)


async def test_cancelling_a_call_closes_its_generator() -> None:
    servicer = FailingRouter(None)
    async with serving(servicer) as channel:
        call = router_stub(channel).GenerateStream(router_pb2.GenerateRequest())
        assert isinstance(await call.read(), router_pb2.GenerateResponse)
        call.cancel()
        await asyncio.wait_for(servicer.closed.wait(), 10)


async def test_health_says_serving_and_reflection_lists_the_service() -> None:
    async with serving(FailingRouter(None)) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="kvrelay.v1.Router"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, channel))
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        reply = await call.read()
        assert "kvrelay.v1.Router" in {service.name for service in reply.list_services_response.service}


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what was logged, but for gRPC's queue, which all loops of a process share: it may still have something
    for one that an earlier test has closed."""
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "PollerCompletionQueue" not in message]


async def test_a_call_that_its_service_has_ended_keeps_that_status_and_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(FailingRouter(None)) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="kvrelay.v1.Nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert not failures(caplog)


async def test_a_request_that_is_no_message_of_the_method_is_the_client_s_fault() -> None:
    async with serving(FailingRouter(None)) as channel:
        call: Any = channel.unary_unary("/kvrelay.v1.Router/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_compressed_request_is_refused() -> None:
    """A few kilobytes may be megabytes, which are there before a limit sees them."""
    async with serving(FailingRouter(None)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router_stub(channel).Generate(router_pb2.GenerateRequest(), compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_so_is_one_in_a_stream_of_requests(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FailingRouter(None)) as channel:
        call: Any = channel.stream_stream("/kvrelay.v1.DecodeNode/Serve")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(iter([b"\xff"])).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not failures(caplog)


@pytest.mark.parametrize("details", [b"\xff\xff", foreign_details()], ids=["garbled", "of another domain"])
def test_details_that_are_not_ours_do_not_hide_the_code(details: bytes) -> None:
    """Such as those of a proxy."""
    trailing = grpc.aio.Metadata((DETAILS_KEY, details))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details=None)
    found = error_from_rpc(error)
    assert type(found) is UnavailableError
    assert str(found) == "UNAVAILABLE"


async def test_an_error_without_a_reason_of_its_own_comes_back_as_what_it_is_a_kind_of() -> None:
    class LostError(KVError):
        pass

    rpc_error, restored = await raised_by_generate(LostError("gone"))
    assert (rpc_error.code(), type(restored), str(restored)) == (grpc.StatusCode.INTERNAL, KVError, "gone")


def test_details_behind_other_metadata_are_found() -> None:
    """A service may send some of its own."""
    encoded: bytes = rich_status(GivenUpError("nodes ended")).SerializeToString()
    trailing = grpc.aio.Metadata(("request-bin", b"r"), (DETAILS_KEY, encoded))
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), trailing, details="nodes ended")
    assert type(error_from_rpc(error)) is GivenUpError


async def test_a_connection_may_take_longer_than_the_wait_for_the_next() -> None:
    """Otherwise no process is reached over a slow network, or on a host that is busy."""
    arrived, given_up = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        with suppress(ConnectionError):
            await reader.read()
        given_up.set()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            channel.get_state(try_to_connect=True)
            await asyncio.wait_for(arrived.wait(), 10)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(given_up.wait(), 2 * RECONNECT_SECONDS)
        await asyncio.wait_for(given_up.wait(), 10)


def test_grpc_knows_every_option_by_its_name() -> None:
    """It ignores others without a word: a wrong name once kept the server from allowing pings every few seconds."""
    library = Path(str(import_module("grpc._cython.cygrpc").__file__)).read_bytes()
    for name, _ in channel_options() + server_options():
        assert f"{name}\0".encode() in library, name


def test_a_server_allows_as_many_pings_as_a_channel_sends() -> None:
    """After two that come too early it closes the connection, and all calls on it."""
    client, server = dict(channel_options()), dict(server_options())
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]


@pytest.mark.parametrize(("silence", "milliseconds"), [(5.0, 5_000), (30.0, 30_000), (1e12, 10**9)])
def test_a_connection_lasts_as_long_as_the_other_side_may_be_silent(silence: float, milliseconds: int) -> None:
    """And longer where our own process may have been stopped meanwhile."""
    options = channel_options(silence=silence)
    assert dict(options)["grpc.keepalive_timeout_ms"] == milliseconds
    assert dict(options)["grpc.http2.ping_timeout_ms"] == milliseconds + 10_000
    grpc.insecure_channel("127.0.0.1:1", options=options).close()


async def test_calls_that_arrive_while_the_loop_is_busy_are_all_answered() -> None:
    """gRPC would cancel some of those beyond a thousand, at random and without a word of ours."""
    server = grpc.aio.server(interceptors=[CallInterceptor()], options=server_options())
    router_pb2_grpc.add_RouterServicer_to_server(FailingRouter(OverloadedError("full")), server)
    port = await serve_insecure(server, "127.0.0.1", 0)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        await asyncio.to_thread(grpc.channel_ready_future(channel).result, timeout=10)
        calls = [stub.Generate.future(router_pb2.GenerateRequest()) for _ in range(1500)]
        codes = await asyncio.to_thread(lambda: {call.code() for call in calls})
    await server.stop(None)
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving(FailingRouter(None)) as channel:
        call: Any = channel.unary_unary("/kvrelay.v1.Router/Nothing")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "UNIMPLEMENTED" in str(error_from_rpc(caught.value))


async def test_a_refused_connection_is_unavailable_and_a_taken_port_is_a_configuration_error() -> None:
    server = grpc.aio.server(options=server_options())
    port = await serve_insecure(server, "127.0.0.1", 0)
    with pytest.raises(
        ConfigurationError, match=f"{port}: Address already in use; choose another port with --grpc-port"
    ):
        await serve_insecure(grpc.aio.server(options=server_options()), "127.0.0.1", port, flag="--grpc-port")
    await server.stop(None)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router_stub(channel).ListModels(router_pb2.ListModelsRequest(), timeout=10)
    assert isinstance(error_from_rpc(caught.value), UnavailableError)


class EndlessRouter(FailingRouter):
    """A router that streams more than any window holds."""

    closed_in: "asyncio.Task[None] | None" = None

    async def GenerateStream(
        self, request: router_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        self.begun_in = asyncio.current_task()
        try:
            while True:
                yield router_pb2.GenerateResponse(request_id="x" * (1 << 20))
        finally:
            self.closed_in = asyncio.current_task()
            self.closed.set()


async def test_a_client_that_takes_nothing_of_its_stream_loses_it() -> None:
    servicer = EndlessRouter(None)
    server = grpc.aio.server(interceptors=[CallInterceptor(write_timeout=0.2)], options=server_options())
    router_pb2_grpc.add_RouterServicer_to_server(servicer, server)
    port = await serve_insecure(server, "127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            call = router_stub(channel).GenerateStream(router_pb2.GenerateRequest())
            async with asyncio.timeout(30.0):
                await servicer.closed.wait()  # while the client is still there, and has read nothing
            assert not call.done() and servicer.closed_in is servicer.begun_in
            call.cancel()
    finally:
        await server.stop(None)
