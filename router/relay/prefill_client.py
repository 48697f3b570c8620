"""The router's side of a prefill node: one bidirectional stream that carries all of its requests, and the leases that
outlive them there.

Invariant: a lease is renewed from when the router hears of it until its session releases it. A release that the stream
loses is not repeated: nobody renews that lease any more, and it expires at the node.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import grpc

from kvrelay.core.errors import DeadlineError, KVRelayError, UnavailableError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.source import HeldBlocks
from kvrelay.core.node_report import FetchReport
from kvrelay.core.rpc.connections import understood
from kvrelay.core.rpc.errors import error_from_rpc, error_from_status
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
from router.relay.node_stream import NodeStream
from router.request import NodeRequest

_logger = logging.getLogger(__name__)
_RENEWALS_PER_TTL = 3


@dataclass(frozen=True, slots=True)
class PrefillAccepted:
    """The node has taken the request, and its lease has begun."""


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
    """This is the last event. Without an error, all blocks are published that could be."""

    error: KVRelayError | None


PrefillEvent = PrefillAccepted | PrefillProgress | PrefillFinished | PrefillEnded
Sink = Callable[[PrefillEvent], None]
_Stream = NodeStream[pb.PrefillCommand, pb.PrefillEvent, PrefillEvent]


class PrefillSession:
    """One request on a prefill node: its events, until `has_ended`, and its lease. All methods return at once."""

    def __init__(self, client: "PrefillClient", wire_id: str, sink: Sink) -> None:
        self.has_ended = False
        self._client = client
        self._wire_id = wire_id
        self._sink = sink
        self._released = False
        self._patience: asyncio.TimerHandle | None = None

    def take(self, event: PrefillEvent) -> None:
        """Hands an event on to the sink."""
        if self.has_ended:
            return
        sink = self._sink
        match event:
            case PrefillAccepted() if not self._released:
                self._client.hold(self._wire_id)
            case PrefillFinished():  # after the time of a lease, waiting for the rest is of no use
                seconds = self._client.lease_ttl
                self._patience = asyncio.get_running_loop().call_later(seconds, self._give_up)
            case PrefillEnded():
                self.end()
        sink(event)

    def release(self) -> None:
        """Releases the lease, because the blocks are no longer needed; a prefill that has not finished ends with it.
        Idempotent."""
        if not self._released:
            self._released = True
            self._client.release(self._wire_id)

    def end(self) -> None:
        """Ends the session's events. Idempotent."""
        self.has_ended = True
        self._sink = _ignore  # the sink refers to the request, which may have its outputs for long
        self._client.forget(self._wire_id)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def close(self) -> None:
        """Ends the session's events, the prefill if it is under way, and its lease. Idempotent."""
        self.end()
        self.release()

    def _give_up(self) -> None:
        self.take(PrefillEnded(DeadlineError(f"{self._client.name} did not publish all blocks in time")))


class PrefillClient:
    """One per prefill node. Its stream is opened for the first request, and anew for the first command after it broke.
    `lease_ttl` in seconds; `timeout`: seconds that a renewal of leases may take, and a stop."""

    def __init__(self, channel: grpc.aio.Channel, address: str, *, lease_ttl: float, timeout: float) -> None:
        self.name = f"prefill node {address}"
        self.lease_ttl = lease_ttl
        self._stub = cast("prefill_node_pb2_grpc.PrefillNodeAsyncStub", prefill_node_pb2_grpc.PrefillNodeStub(channel))
        self._timeout = timeout
        self._held: set[str] = set()
        self._heartbeat: asyncio.Task[None] | None = None
        self._stream: _Stream | None = None

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
            sampling_params=sampling_to_wire(node_request.sampling),
            priority=node_request.priority,
            lease_ttl_ms=self._lease_ttl_ms,
            cache_salt=node_request.cache_salt,
            sources=[held_to_wire(held) for held in sources],
            num_prior_output_tokens=node_request.num_prior_output_tokens,
            first_choice_index=node_request.first_choice_index,
            timeout_ms=max(1, round(timeout * 1000)),
        )
        command = pb.PrefillCommand(prefill=message)
        command.prefill.prompt_token_ids.extend(node_request.token_ids)  # here, because the line above makes a copy
        session = PrefillSession(self, wire_id, sink)
        stream = self._open_stream()
        stream.add(wire_id, session.take)
        stream.send(command)
        return session

    def lose(self, error: KVRelayError) -> None:
        """Ends all sessions with `error` at once, because the node is lost although its stream has not broken."""
        if self._stream is not None:
            self._stream.lose(error)

    def forget(self, wire_id: str) -> None:
        """Has no more events of a request handed on."""
        if self._stream is not None:
            self._stream.remove(wire_id)

    def hold(self, wire_id: str) -> None:
        """Renews the lease of a request from now on, until `release`."""
        self._held.add(wire_id)
        if self._heartbeat is None or self._heartbeat.done():
            self._heartbeat = begin_task(self._renew_forever(), name=f"lease heartbeat {self.name}")

    def release(self, wire_id: str) -> None:
        """Releases the lease of a request, and ends its prefill unless it is finished."""
        self._held.discard(wire_id)
        self._open_stream().send(pb.PrefillCommand(release=pb.Release(request_id=wire_id)))

    async def close(self) -> None:
        """Waits at most `timeout` seconds until the node has read all commands. Called when all sessions are closed."""
        if self._stream is not None:
            await self._stream.close(timeout=self._timeout)
        await end_tasks(self._heartbeat)

    @property
    def _lease_ttl_ms(self) -> int:
        return max(1, round(self.lease_ttl * 1000))

    def _open_stream(self) -> _Stream:
        if self._stream is None or self._stream.broken:
            self._stream = NodeStream(
                self._stub.Serve,
                self.name,
                message_of=lambda commands: pb.PrefillCommands(commands=commands),
                event_from_wire=_event_from_wire,
                failed=PrefillEnded,
                is_last=lambda event: isinstance(event, PrefillEnded),
            )
        return self._stream

    async def _renew_forever(self) -> None:
        interval = self.lease_ttl / _RENEWALS_PER_TTL
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
            _logger.warning("%d leases at %s not renewed: %s", len(lease_ids), self.name, error)
            return
        for lease_id in answer.unknown_lease_ids:
            if lease_id in self._held:
                _logger.warning("lease %s at %s is gone before its release", lease_id, self.name)
                self._held.discard(lease_id)


def _event_from_wire(message: pb.PrefillEvent) -> PrefillEvent | None:
    """Returns None for an event of a newer protocol. Raises KVRelayError for one that breaks the protocol."""
    match message.WhichOneof("event"):
        case "accepted":
            return PrefillAccepted()
        case "progress":
            return PrefillProgress(message.progress.num_published_blocks)
        case "finished":
            return PrefillFinished(
                first_tokens=tuple(output_from_wire(output) for output in message.finished.first_tokens),
                prompt_logprobs=prompt_logprobs_from_wire(message.finished.prompt_logprobs),
                num_cached_tokens=message.finished.num_cached_tokens,
                fetches=fetch_report_from_wire(message.finished.fetches),
            )
        case "ended":
            return PrefillEnded(None)
        case "failed":
            return PrefillEnded(error_from_status(message.failed.status))
        case _:
            return None


def _ignore(event: PrefillEvent) -> None:
    """Does nothing: the sink of a session that has ended."""
