"""The router process: HTTP gateway and gRPC service over one relay, in one asyncio loop.

Invariant: a stop takes bounded time; running requests either end within it, and clients have their answers, or fail
with UNAVAILABLE.
"""

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.types import ASGIApp

from kvrelay import __version__
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.config.settings import load_settings
from kvrelay.core.errors import ConfigurationError, KVRelayError
from kvrelay.core.model.directory import resolve_model_directory
from kvrelay.core.model.vocabulary import vocabulary_digest
from kvrelay.core.process.lifecycle import StopSignals, announce_ready, raise_open_files_limit
from kvrelay.core.process.listening import address_of, bound_socket, check_port
from kvrelay.core.process.logs import configure_logging
from kvrelay.core.rpc.calls import CallInterceptor
from kvrelay.core.rpc.connections import (
    WHOLE_SERVER,
    add_health_and_reflection,
    serve_insecure,
    server_options,
    set_serving,
)
from kvrelay.core.rpc.health_service import HealthService
from kvrelay.core.tasks import begin_task, end_tasks, first_of
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2_grpc
from router.edge.edge import Edge
from router.edge.gateway import create_app
from router.edge.grpc_service import SERVICE_NAME, RouterService
from router.edge.http_protocol import BoundedHttp
from router.edge.metrics import RouterMetrics
from router.nodes.kv_index import KVIndex
from router.nodes.node_metrics import NodeMetrics
from router.nodes.registry import Registry
from router.policies.choice import make_policy
from router.relay.limits import RelayLimits
from router.relay.placer import Placer
from router.relay.recovery_metrics import RecoveryMetrics
from router.relay.relay import ClusterRelay
from router.settings import RouterSettings

_logger = logging.getLogger(__name__)
# Load balancers keep idle connections for a minute or less. If we closed one first, a request that is under way on it
# would be lost, and they may not send it again.
_IDLE_CONNECTION_SECONDS = 75
# With a thousand streams a turn of the loop may take a tenth of a second. With one connection each, those who come at
# once would wait for many seconds, health checks among them.
_ACCEPTED_PER_TURN = 16
_LEAST_GRACE_SECONDS = 1.0  # for sending their errors to requests that a stop has failed


@dataclass(frozen=True, slots=True)
class ServedAddresses:
    """The addresses of both servers, each as `host:port`."""

    http: str
    grpc: str


@dataclass(frozen=True, slots=True)
class _GrpcServer:
    port: int
    health: HealthService


def main(argv: Sequence[str]) -> int:
    """Runs one router until it is told to stop; returns the exit status."""
    settings = load_settings(RouterSettings, argv, prog="kvrelay router")
    configure_logging("router", settings.log_level)
    if (limit := raise_open_files_limit()) <= settings.max_concurrent_requests:
        _logger.warning(
            "this process may open %d files, of which each client's connection is one: further ones are reset before "
            "--max-concurrent-requests (%d) are running; raise its hard limit (systemd: LimitNOFILE)",
            limit, settings.max_concurrent_requests,
        )  # fmt: skip
    try:
        uvloop.run(_run(settings))
    except KVRelayError as error:
        _logger.critical("%s", error)
        return 1
    return 0


async def _run(settings: RouterSettings) -> None:
    signals = StopSignals(supervised=settings.supervised)
    stop = signals.stop
    async with serve(settings, stop, signals.hurry) as addresses:
        if not stop.is_set():
            name = served_model_name(settings)
            announce_ready(role="router", http_address=addresses.http, grpc_address=addresses.grpc, model=name)
            _logger.info("%s is served: HTTP on %s, gRPC on %s", name, addresses.http, addresses.grpc)
        await stop.wait()
        _logger.info("stopping")


class _Grace:
    """For how long clients may take their answers at a stop, in which `hurry` is set to end that early."""

    def __init__(self, hurry: asyncio.Event) -> None:
        self.hurry = hurry
        self._due = -math.inf

    def begin(self, seconds: float) -> None:
        self._due = asyncio.get_running_loop().time() + seconds

    def left(self) -> float:
        """Returns how many seconds are left. There is always time for errors, which are sent at once."""
        left = self._due - asyncio.get_running_loop().time()
        return _LEAST_GRACE_SECONDS if self.hurry.is_set() else max(_LEAST_GRACE_SECONDS, left)


@asynccontextmanager
async def serve(settings: RouterSettings, stop: asyncio.Event, hurry: asyncio.Event) -> AsyncIterator[ServedAddresses]:
    """Runs a whole router while the context is open. `stop` ends the wait for nodes early, and is set when the HTTP
    server ends by itself; `hurry` ends the wait at the end, for running requests and for clients that take their
    answers. Raises ConfigurationError for settings with which nothing can be served."""
    if not settings.decode_nodes:
        raise ConfigurationError("--decode-nodes is empty: without a decode node nothing can be served")
    check_port(settings.host, settings.port, flag="--port")  # before the nodes are waited for
    check_port(settings.host, settings.grpc_port, flag="--grpc-port")
    directory = await asyncio.to_thread(resolve_model_directory, settings.model)
    vocabulary = await asyncio.to_thread(vocabulary_digest, directory)
    index = KVIndex(settings.kv_index_capacity)
    registry = Registry(
        settings.prefill_nodes,
        settings.decode_nodes,
        index,
        timeout=settings.node_timeout,
        silence=settings.node_silence,
        vocabulary=vocabulary,
    )
    registry.start()
    collectors = CollectorRegistry()
    relay = _relay(settings, registry, collectors)
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, settings.model)
        edge = _edge(settings, relay, tokenizer, collectors)
        collectors.register(NodeMetrics(registry))
        ProcessCollector(registry=collectors)
        await _wait_for_nodes(settings, registry, stop)
        grace = _Grace(hurry)
        async with (
            _serve_grpc(settings, edge, grace) as grpc_server,
            _serve_http(settings, edge, stop, grace) as http_port,
        ):
            async with _reporting(grpc_server.health, registry):
                yield ServedAddresses(
                    http=address_of(settings.host, http_port), grpc=address_of(settings.host, grpc_server.port)
                )
            # Here, where clients can still be answered.
            grace.begin(settings.stop_timeout)
            await first_of(relay.close(timeout=settings.stop_timeout), hurry.wait())
            await relay.close(timeout=0)
    finally:
        await relay.close(timeout=0)
        await registry.close()


def served_model_name(settings: RouterSettings) -> str:
    """Returns the setting `served_model_name` or, without one, the model as the operator wrote it."""
    return settings.served_model_name or settings.model


def _relay(settings: RouterSettings, registry: Registry, collectors: CollectorRegistry) -> ClusterRelay:
    policy = make_policy(settings.policy, local_prefill_max_tokens=settings.local_prefill_max_tokens)
    limits = RelayLimits(
        max_concurrent_requests=settings.max_concurrent_requests,
        max_node_losses=settings.max_node_losses,
        node_wait=settings.node_wait,
        lease_ttl=settings.lease_ttl,
        node_timeout=settings.node_timeout,
    )
    placer = Placer(registry, policy, limits)
    return ClusterRelay(registry, placer, limits, RecoveryMetrics(served_model_name(settings), collectors))


def _edge(settings: RouterSettings, relay: ClusterRelay, tokenizer: Tokenizer, collectors: CollectorRegistry) -> Edge:
    name = served_model_name(settings)
    metrics = RouterMetrics(name, collectors)
    return Edge(relay, tokenizer, name, metrics, MonotonicClock(), default_timeout=settings.request_timeout)


async def _wait_for_nodes(settings: RouterSettings, registry: Registry, stop: asyncio.Event) -> None:
    """Waits for at most `start_timeout` seconds: a router without nodes still answers, and says what is missing."""
    await first_of(registry.wait_settled(), stop.wait(), asyncio.sleep(settings.start_timeout))
    for node in registry.nodes:
        _logger.info("%s node %s is %s", node.role.value, node.name, node.state.value)


@asynccontextmanager
async def _serve_grpc(settings: RouterSettings, edge: Edge, grace: _Grace) -> AsyncIterator[_GrpcServer]:
    # A message that is parsed may take thirty times its bytes, and the loop waits for it.
    options = server_options(max_request_bytes=settings.max_body_bytes)
    server = grpc.aio.server(interceptors=[CallInterceptor()], options=options)
    router_pb2_grpc.add_RouterServicer_to_server(RouterService(edge), server)
    servicer = add_health_and_reflection(server, [SERVICE_NAME])
    port = await serve_insecure(server, settings.host, settings.grpc_port, flag="--grpc-port")
    await set_serving(servicer, [WHOLE_SERVER], serving=True)
    try:
        yield _GrpcServer(port, servicer)
    finally:
        servicer.close()
        await first_of(server.stop(grace.left()), grace.hurry.wait())
        await server.stop(grace.left())  # returns at once if the server has stopped


@asynccontextmanager
async def _reporting(servicer: HealthService, registry: Registry) -> AsyncIterator[None]:
    """Reports by the service's gRPC health whether a decode node can serve; NOT_SERVING once the context has ended."""

    async def report() -> None:
        registry.changed.clear()
        await set_serving(servicer, [SERVICE_NAME], serving=registry.can_serve())

    async def follow() -> None:
        while True:
            await registry.changed.wait()
            await report()

    await report()
    following = begin_task(follow(), name="readiness")
    try:
        yield
    finally:
        await end_tasks(following)
        await set_serving(servicer, [SERVICE_NAME], serving=False)


class _HttpServer(uvicorn.Server):
    """uvicorn as a library: it leaves signals to our process, sets `started_event` when it listens, and waits for
    clients that take their answers as long as `grace` says."""

    def __init__(self, config: uvicorn.Config, grace: _Grace) -> None:
        super().__init__(config)
        self.started_event = asyncio.Event()
        self._grace = grace

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_event.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.timeout_graceful_shutdown = math.ceil(self._grace.left())
        await first_of(super().shutdown(sockets), self._grace.hurry.wait())
        if self._grace.hurry.is_set():
            self.config.timeout_graceful_shutdown = math.ceil(self._grace.left())
            await super().shutdown(sockets)


@asynccontextmanager
async def _serve_http(settings: RouterSettings, edge: Edge, stop: asyncio.Event, grace: _Grace) -> AsyncIterator[int]:
    """Serves HTTP while the context is open, and yields the port. Sets `stop` when the server ends for any reason."""
    listeners = listen(settings.host, settings.port)
    port: int = listeners[0].getsockname()[1]
    app = create_app(
        edge,
        version=__version__,
        max_body_bytes=settings.max_body_bytes,
        allowed_origins=settings.allowed_origins,
    )
    server = _HttpServer(http_config(app), grace)
    task = asyncio.create_task(server.serve(sockets=listeners), name="http")
    task.add_done_callback(lambda _: stop.set())
    started = asyncio.create_task(server.started_event.wait())
    await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    try:
        yield port
    finally:
        server.should_exit = True
        await task


def http_config(app: ASGIApp) -> uvicorn.Config:
    """Returns how the HTTP server serves `app`."""
    return uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_IDLE_CONNECTION_SECONDS,
        timeout_graceful_shutdown=math.ceil(_LEAST_GRACE_SECONDS),
    )


def listen(host: str, port: int) -> list[socket.socket]:
    """Returns what the HTTP server listens on: the same socket `_ACCEPTED_PER_TURN` times, because uvloop accepts one
    connection of each in a turn of its loop. Raises ConfigurationError when the port is taken."""
    listener = bound_socket(host, port, flag="--port")
    listener.listen()
    # Accepted connections inherit the option; asyncio sets it only on sockets that it made itself. Without it each
    # event waits until the client has acknowledged the one before, up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return [listener, *(listener.dup() for _ in range(_ACCEPTED_PER_TURN - 1))]
