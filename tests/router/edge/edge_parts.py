"""What the tests of the edge are built on: a real byte-level tokenizer, and a relay that follows a script."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import (
    CancelledByPeerError,
    InvalidRequestError,
    KVRelayError,
    OverloadedError,
    UnavailableError,
)
from kvrelay.core.generation.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.text.tokenizer import Tokenizer
from router.app import http_config
from router.edge.edge import Edge
from router.edge.metrics import RouterMetrics
from router.request import KVOrigins, RequestEvent, RequestTrace, RoutedRequest, ServedModel

MODEL = "tiny-model"
MAX_MODEL_LEN = 256
MAX_NUM_SEQS = 64


@dataclass
class ScriptedRelay:
    """A relay in which every choice answers `reply`, one token per event, the choices in turn. `fail_with` is raised
    before token `fail_at` of the first choice; at token `hang_at` the relay waits until it is closed or aborted.
    Log-probabilities are made up: -0.5 for the token, and -1, -2, .. for the tokens 2, 3, .. among the most likely
    ones."""

    tokenizer: Tokenizer
    reply: str = "Paris is the capital of France"
    fail_with: KVRelayError | Exception | None = None
    fail_at: int = 0
    hang_at: int | None = None
    available: bool = True
    has_capacity: bool = True
    max_model_len: int = MAX_MODEL_LEN
    requests: list[RoutedRequest] = field(default_factory=list)
    capacity_checked: asyncio.Event = field(default_factory=asyncio.Event)
    running: set[str] = field(default_factory=set)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: dict[str, asyncio.Event] = field(default_factory=dict)
    finished: list[tuple[str, int]] = field(default_factory=list)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def reset(self) -> None:
        """Restores the state of a new relay, for the next test of a shared server."""
        vars(self).update(vars(ScriptedRelay(self.tokenizer)))

    def served_model(self) -> ServedModel:
        if not self.available:
            raise UnavailableError("no decode node is known")
        namespace = KVNamespace(b"fingerprint", "float32", "layout", 16)
        return ServedModel(self.max_model_len, MAX_NUM_SEQS, self.tokenizer.vocab_size, namespace)

    def check_capacity(self, num_admitting: int = 0, num_wanted: int = 1) -> None:
        self.capacity_checked.set()
        if not self.has_capacity:
            raise OverloadedError("the queue is full")

    async def run(self, request: RoutedRequest) -> AsyncGenerator[RequestEvent, None]:
        if request.request_id in self.running:
            raise InvalidRequestError("it is running already", field="request_id")
        self.running.add(request.request_id)
        self.requests.append(request)
        aborted = self.aborted.setdefault(request.request_id, asyncio.Event())
        try:
            async for event in self._script(request, aborted):
                await asyncio.sleep(0)
                yield event
        finally:
            self.running.remove(request.request_id)
            self.closed.set()

    def finish(self, request_id: str, index: int) -> None:
        self.finished.append((request_id, index))

    def abort(self, request_id: str) -> None:
        if request_id in self.aborted:
            self.aborted[request_id].set()

    async def _script(self, request: RoutedRequest, aborted: asyncio.Event) -> AsyncGenerator[RequestEvent, None]:
        sampling = request.sampling
        if sampling.prompt_logprobs is not None:
            entries = (_logprobs(token_id, sampling.prompt_logprobs) for token_id in request.prompt_token_ids[1:])
            yield PromptLogprobs.of(entries)
        reply = [*await self.tokenizer.encode(self.reply, add_special_tokens=False), 1]
        num_tokens = min(len(reply), sampling.max_tokens)
        for i, token_id in enumerate(reply[:num_tokens]):
            for index in range(sampling.n):
                if self.fail_with is not None and i == self.fail_at:
                    raise self.fail_with
                if i == self.hang_at:
                    await aborted.wait()
                    raise CancelledByPeerError("the request was aborted")
                logprobs = () if sampling.logprobs is None else (_logprobs(token_id, sampling.logprobs),)
                if (request.request_id, index) in self.finished:
                    continue
                ended = token_id == 1
                reason = FinishReason.STOP if ended else FinishReason.LENGTH if i + 1 == num_tokens else None
                yield TokenOutput(index, (token_id,), logprobs, reason, token_id if ended else None)
        kv = KVOrigins(num_holder_blocks=1, num_recomputed_tokens=3)
        yield RequestTrace("prefill-0", "decode-0", 1, 3, 2, 1, 0.001, 0.002, 0.003, kv=kv, handover_seconds=0.004)


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    top = ((token_id, -0.5), *((2 + i, -1.0 - i) for i in range(num_top)))
    return TokenLogprobs(token_id, -0.5, 1, top[:num_top])


def make_edge(relay: ScriptedRelay, clock: Clock | None = None) -> Edge:
    metrics = RouterMetrics(MODEL, CollectorRegistry())
    return Edge(relay, relay.tokenizer, MODEL, metrics, clock or MonotonicClock(), default_timeout=60.0)


def counted(edge: Edge, name: str, **labels: str) -> float | None:
    return edge.metrics.registry.get_sample_value(f"kvrelay:{name}", {"model_name": MODEL, **labels})


@asynccontextmanager
async def http_server(app: ASGIApp, *, idle_seconds: int | None = None) -> AsyncIterator[int]:
    """Runs a real uvicorn server, set up as a router's, on a free port, which it yields. `idle_seconds`: after how many
    it closes a connection without a request, if not a router's."""
    listener = socket.create_server(("127.0.0.1", 0))  # clients may connect before the server accepts
    config = http_config(app)
    if idle_seconds is not None:
        config.timeout_keep_alive = idle_seconds
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        listener.close()
