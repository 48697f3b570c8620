"""gRPC connections as every process makes them: one set of options, the port of a server, health and reflection.

`calls.py` has how a server runs its calls, `errors.py` how errors travel.
"""

from collections.abc import Iterable
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.core.errors import ConfigurationError, UnavailableError
from kvrelay.core.process.listening import address_of, check_port
from kvrelay.core.rpc.health_service import HealthService

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# gRPC sends a ping after so long without a message. With messages it sends others, which measure the connection, where
# the window grows.
KEEPALIVE_MS = 10_000
# How long the other machine may acknowledge nothing. gRPC's keepalive timeout is only that, TCP_USER_TIMEOUT: it waits
# for the answer to any ping, which is that of the process, for its ping timeout.
KEEPALIVE_TIMEOUT_MS = 5_000
PING_TIMEOUT_MS = 60_000
# How much longer the other process may take to answer than it may be silent: this one may be stopped for a while
# (SIGSTOP), and when it goes on, gRPC looks at its timers before it reads the answers that wait.
STOPPED_MS = 10_000
# Calls that have arrived and that the loop has not looked at yet: it takes up one in a turn or two. gRPC cancels
# further ones, and those that have waited for so long; by default some of those beyond a thousand, and after 30 s. The
# client cannot tell why; a router refuses what is too much for it in its own words.
MAX_PENDING_CALLS = 10_000
MAX_PENDING_SECONDS = 300
RECONNECT_SECONDS = 0.5  # longest wait between two attempts to reach a process: requests may wait for it
CONNECT_SECONDS = 2.0  # longest attempt: it takes two round trips, maybe to a host that is busy
WHOLE_SERVER = ""  # the health service's name for the server as a whole, which serves while the process works

Options = list[tuple[str, int]]
T = TypeVar("T")

# For a channel to a node or a router, which is reached directly, whatever the host's proxy settings say.
WITHOUT_PROXY: Options = [("grpc.enable_http_proxy", 0)]
# How much is received of a call before it is read. One window holds a burst of messages at first, and grows with the
# measured bandwidth-delay product.
GROWING_WINDOW: Options = [("grpc.http2.lookahead_bytes", 1024 * 1024), ("grpc.http2.bdp_probe", 1)]
# The other is for a router that reads tokens, perhaps slower than they come: those that wait at their node travel
# together (decode_node/router_stream.py), while those that were sent can only be read one message after the other. A
# message that is larger takes one more round trip, or a few. With the probe the window would be 128 KiB or more.
SMALL_WINDOW: Options = [("grpc.http2.lookahead_bytes", 16 * 1024), ("grpc.http2.bdp_probe", 0)]


def _shared_options(*, max_receive_bytes: int, keepalive_timeout_ms: int, ping_timeout_ms: int) -> Options:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", keepalive_timeout_ms),
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(*, silence: float = KEEPALIVE_TIMEOUT_MS / 1e3, window: Options = GROWING_WINDOW) -> Options:
    """Returns the options for `grpc.aio.insecure_channel`. With them, a restarted process is found about
    `RECONNECT_SECONDS` later, and one that has another IP address under its name two seconds after the name says so.

    `silence`: seconds for which nothing may be heard of the other process. A connection is given up, and made anew,
    when its machine acknowledges nothing for that long, or it answers no ping for 10 s longer. Unless one is under way,
    gRPC sends a ping after 10 s without a message."""
    silence_ms = round(min(silence, 1e6) * 1e3)  # gRPC takes no more than 32 bits
    return [
        *_shared_options(
            max_receive_bytes=MAX_MESSAGE_BYTES,
            keepalive_timeout_ms=silence_ms,
            ping_timeout_ms=silence_ms + STOPPED_MS,
        ),
        *WITHOUT_PROXY,
        *window,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(CONNECT_SECONDS * 1e3)),  # how long an attempt may take, in truth
        ("grpc.max_reconnect_backoff_ms", round(RECONNECT_SECONDS * 1e3)),
        ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    ]


def server_options(
    *,
    max_request_bytes: int = MAX_MESSAGE_BYTES,
    keepalive_timeout_ms: int = KEEPALIVE_TIMEOUT_MS,
    ping_timeout_ms: int = PING_TIMEOUT_MS,
) -> Options:
    """Returns the options for `grpc.aio.server`. A peer loses its calls if its machine acknowledges nothing for
    `keepalive_timeout_ms`, or if it answers no ping for `ping_timeout_ms`: it is stopped, or something in between
    passes nothing on. Ports are not shared: two servers on one port would split a cluster unnoticed."""
    return [
        *_shared_options(
            max_receive_bytes=max_request_bytes,
            keepalive_timeout_ms=keepalive_timeout_ms,
            ping_timeout_ms=ping_timeout_ms,
        ),
        *GROWING_WINDOW,
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_SECONDS),
        ("grpc.so_reuseport", 0),
        # None of ours compresses. A small message may become a huge one, which no limit sees before it is there.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


def understood(answer: T | None) -> T:
    """Returns an answer of another process. gRPC gives None for bytes that are no such message, damaged ones or those
    of another program: raises UnavailableError for it."""
    if answer is None:
        raise UnavailableError("what it answers is not understood: is it a process of kvrelay?")
    return answer


async def serve_insecure(server: grpc.aio.Server, host: str, port: int, *, flag: str = "--port") -> int:
    """Binds the server (port 0 draws a free one), starts it, and returns the bound port. `flag` is the flag that sets
    the port. Raises ConfigurationError, which names the flag to change, if nothing can listen there."""
    check_port(host, port, flag=flag)  # gRPC would not say why it cannot, and write to standard error
    address = address_of(host, port)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        check_port(host, port, flag=flag)  # another process may have taken the port meanwhile
        raise ConfigurationError(
            f"cannot listen on {address}: {error}; --host has to be an address of this machine"
        ) from error
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
