"""The router's side of a prefill node: its streams, and the leases that outlive them.

Invariant: a lease is renewed from when the router hears of it until its session releases it, even if the session is
cancelled in between. A release is tried twice, each time with a deadline, in a task of its own, which no cancellation
of the session ends. If both fail, the lease expires at the node.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias, cast

import grpc

from kvrelay.core.errors import DeadlineError, KVRelayError, UnavailableError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.source import HeldBlocks
from kvrelay.core.node_report import FetchReport
from kvrelay.core.rpc.connections import understood
from kvrelay.core.rpc.errors import error_from_rpc
from kvrelay.core.rpc.wire import (
    fetch_report_from_wire,
    held_to_wire,
    output_from_wire,
    prompt_logprobs_from_wire,
    sampling_to_wire,
)
from kvrelay.core.tasks import begin_task, end_tasks
from kvrelay.v1 import prefill_node_pb2 as pb
from kvrelay.v1 import prefill_node_pb2_grpc
from router.request import NodeRequest

_logger = logging.getLogger(__name__)
_RELEASE_ATTEMPTS = 2
_RENEWALS_PER_TTL = 3
# When a request's time is over, its supervisor says what it waited for. gRPC, which would not, ends the call later.
_DEADLINE_MARGIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PrefillAccepted:
    """The node has taken the request and granted a lease."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """The prompt's first `num_published_blocks` blocks can be fetched from the node."""

    num_published_blocks: int


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The prompt is computed, and the first token of every output is sampled. Blocks may still be published after
    it."""

    first_tokens: tuple[TokenOutput, ...]
    prompt_logprobs: PromptLogprobs
    num_cached_tokens: int
    fetches: FetchReport


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The stream is over. Without an error, all blocks are published that could be. This is the last event."""

    error: KVRelayError | None


_Call: TypeAlias = "grpc.aio.UnaryStreamCall[pb.PrefillRequest, pb.PrefillEvent]"
PrefillEvent = PrefillAccepted | PrefillProgress | PrefillFinished | PrefillEnded
Sink = Callable[[PrefillEvent], None]


class PrefillSession:
    """One request on a prefill node: its stream, until `has_ended`, and its lease. All methods return at once."""

    def __init__(self, client: "PrefillClient", call: _Call) -> None:
        self.has_ended = False
        self._client = client
        self._call: _Call | None = call
        self._lease_id: str | None = None
        self._released = False

    @property
    def has_lease(self) -> bool:
        return self._lease_id is not None

    def granted(self, lease_id: str) -> None:
        """Takes the lease that the node has granted, and releases it at once if the session is already over."""
        self._lease_id = lease_id
        self._client.hold(lease_id)
        if self._released:
            self._client.release(lease_id)

    def release(self) -> None:
        """Releases the lease, because the blocks are no longer needed. Idempotent."""
        self._released = True
        if self._lease_id is not None:
            self._client.release(self._lease_id)

    def end(self) -> None:
        """Ends the session's events, and cancels the prefill if it is under way. Idempotent."""
        self.has_ended = True
        if self._call is not None:
            # Not the task that reads it: gRPC loses the memory of a message that has come and is not read any more.
            self._call.cancel()
            self._call = None  # it has the prompt

    def close(self) -> None:
        """Does what `end` does, and releases the lease. Idempotent."""
        self.end()
        self.release()


class PrefillClient:
    """One per prefill node. `lease_ttl` in seconds; `timeout`: seconds that a call about leases may take."""

    def __init__(self, channel: grpc.aio.Channel, address: str, *, lease_ttl: float, timeout: float) -> None:
        self._stub = cast("prefill_node_pb2_grpc.PrefillNodeAsyncStub", prefill_node_pb2_grpc.PrefillNodeStub(channel))
        self._address = address
        self._lease_ttl_ms = max(1, round(lease_ttl * 1000))
        self._timeout = timeout
        self._held: set[str] = set()
        self._heartbeat: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: dict[PrefillSession, Sink] = {}  # that have not ended

    def prefill(
        self,
        wire_id: str,
        node_request: NodeRequest,
        sources: Sequence[HeldBlocks],
        *,
        epoch: int,
        timeout: float,
        sink: Sink,
    ) -> PrefillSession:
        """Starts a prefill at the process of this epoch. Its events go to `sink`, `PrefillEnded` last. A `wire_id` is
        used only once. `sources`: holders of leading blocks, best first. `timeout`: seconds that the request has
        left."""
        message = pb.PrefillRequest(
            request_id=wire_id,
            epoch=epoch,
            prompt_token_ids=node_request.token_ids,
            sampling_params=sampling_to_wire(node_request.sampling),
            priority=node_request.priority,
            lease_ttl_ms=self._lease_ttl_ms,
            cache_salt=node_request.cache_salt,
            sources=[held_to_wire(held) for held in sources],
            num_prior_output_tokens=node_request.num_prior_output_tokens,
            first_choice_index=node_request.first_choice_index,
            timeout_ms=max(1, round(timeout * 1000)),
        )
        call = self._stub.Prefill(message, timeout=timeout + _DEADLINE_MARGIN_SECONDS)
        session = PrefillSession(self, call)
        self._streams[session] = sink
        self._spawn(
            self._stream(session, call, wire_id, sink),
            name=f"prefill {wire_id}",
            on_failure=lambda unforeseen: _end_stream(session, sink, KVRelayError("internal error")),
        )
        return session

    def lose(self, error: KVRelayError) -> None:
        """Ends all streams with `error` at once, because the node is lost although they have not broken."""
        streams, self._streams = self._streams, {}
        for session, sink in streams.items():
            _end_stream(session, sink, error)

    def hold(self, lease_id: str) -> None:
        """Renews a lease from now on, until `release`."""
        self._held.add(lease_id)
        if self._heartbeat is None or self._heartbeat.done():
            self._heartbeat = begin_task(self._renew_forever(), name=f"lease heartbeat {self._address}")

    def release(self, lease_id: str) -> None:
        """Releases a lease in a task of its own, and returns at once. Only the first call for a lease has an effect."""
        if lease_id in self._held:
            self._held.remove(lease_id)
            self._spawn(self._release(lease_id), name=f"release {lease_id}")

    async def close(self) -> None:
        """Waits at most `timeout` seconds for the releases under way, and ends all tasks. Called when all sessions are
        closed."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._timeout)
        await end_tasks(*self._tasks, self._heartbeat)

    async def _stream(self, session: PrefillSession, call: _Call, wire_id: str, sink: Sink) -> None:
        error: KVRelayError | None = None
        try:
            async with aclosing(self._events(session, call)) as events:
                async for event in events:
                    if not session.has_ended:
                        sink(event)
        except asyncio.CancelledError:
            # The node may have finished and granted a lease of which we have not heard yet; its id is the request's.
            if not session.has_lease:
                session.granted(wire_id)
            raise
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
        except KVRelayError as failure:  # an answer that breaks the protocol
            error = failure
        except TimeoutError:
            error = DeadlineError(f"prefill node {self._address} did not publish all blocks in time")
        finally:
            self._streams.pop(session, None)
        _end_stream(session, sink, error)

    async def _events(
        self, session: PrefillSession, call: _Call
    ) -> AsyncGenerator[PrefillAccepted | PrefillProgress | PrefillFinished, None]:
        events = aiter(call)
        patience: float | None = None
        try:
            while True:
                try:
                    async with asyncio.timeout(patience):
                        event = understood(await anext(events))
                except StopAsyncIteration:
                    return
                match event.WhichOneof("event"):
                    case "accepted":
                        session.granted(event.accepted.lease_id)
                        yield PrefillAccepted()
                    case "progress":
                        yield PrefillProgress(event.progress.num_published_blocks)
                    case "finished":
                        patience = self._lease_ttl_ms / 1000  # after that time, waiting for the rest is of no use
                        yield _finished_from_wire(event.finished)
        finally:
            call.cancel()

    async def _release(self, lease_id: str) -> None:
        for attempt in range(1, _RELEASE_ATTEMPTS + 1):
            try:
                await self._stub.ReleaseLeases(pb.ReleaseLeasesRequest(lease_ids=[lease_id]), timeout=self._timeout)
                return
            except grpc.aio.AioRpcError as failure:
                error = error_from_rpc(failure)
                _logger.debug("lease %s at %s, release attempt %d: %s", lease_id, self._address, attempt, error)
        _logger.warning(
            "lease %s at %s could not be released; it expires there, unless the node has ended", lease_id, self._address
        )

    async def _renew_forever(self) -> None:
        interval = self._lease_ttl_ms / 1000 / _RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(interval)
            if self._held:
                await self._renew(sorted(self._held), timeout=min(interval, self._timeout))

    async def _renew(self, lease_ids: list[str], *, timeout: float) -> None:
        message = pb.RenewLeasesRequest(lease_ids=lease_ids, ttl_ms=self._lease_ttl_ms)
        try:
            answer = understood(await self._stub.RenewLeases(message, timeout=timeout))
        except (grpc.aio.AioRpcError, UnavailableError) as failure:
            error = error_from_rpc(failure) if isinstance(failure, grpc.aio.AioRpcError) else failure
            _logger.warning("%d leases at %s not renewed: %s", len(lease_ids), self._address, error)
            return
        for lease_id in answer.unknown_lease_ids:
            if lease_id in self._held:
                _logger.warning("lease %s at %s is gone before its release", lease_id, self._address)
                self._held.discard(lease_id)

    def _spawn(
        self,
        work: Coroutine[None, None, None],
        *,
        name: str,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        task = begin_task(work, name=name, on_failure=on_failure)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _end_stream(session: PrefillSession, sink: Sink, error: KVRelayError | None) -> None:
    if not session.has_ended:
        session.end()  # which lets go of the call, and so of the prompt
        sink(PrefillEnded(error))


def _finished_from_wire(message: pb.PrefillFinished) -> PrefillFinished:
    return PrefillFinished(
        first_tokens=tuple(output_from_wire(output) for output in message.first_tokens),
        prompt_logprobs=prompt_logprobs_from_wire(message.prompt_logprobs),
        num_cached_tokens=message.num_cached_tokens,
        fetches=fetch_report_from_wire(message.fetches),
    )
