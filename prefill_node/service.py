"""The prefill service. The life of a request:

1. `Prefill` opens a lease under the request's own id and adds the request to the engine, which names every block that
   it computes. The lease's time begins when the engine has taken the request, and the router is told of both.
2. If other nodes hold leading blocks, or a store may, these are reserved and fetched first (`Receiver`); the engine
   computes the rest in chunks.
3. As soon as a chunk's blocks are published, the stream reports how many leading blocks can be fetched (`progress`).
   Once publishing has failed, it reports no more: those behind are of no use without them. A connector that took some
   of the blocks has not failed, and the others are MISSING for their readers.
4. The first tokens are sampled from the prompt's last logits (`finished`); they do not wait for publication.
5. The stream ends when the last block was offered to the connector. The engine has then finished the request, and only
   the lease holds its blocks.
6. `ReleaseLeases`, expiry, or a stall of the node (`stall.py`) ends the lease. The blocks stay cached under their names
   until they are evicted.

Invariant: a stream that ends before the lease's time has begun, or before `finished`, leaves nothing behind; one that
ends later leaves only the lease.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import InvalidRequestError, KVRelayError, NotFiniteError, UnavailableError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.core.kv.source import HeldBlocks
from kvrelay.core.node_report import NOTHING_FETCHED, FetchReport, NodeRole
from kvrelay.core.rpc.calls import Context
from kvrelay.core.rpc.wire import fetch_report_to_wire, held_from_wire, output_to_wire, prompt_logprobs_to_wire
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.step_result import EngineLoad, PromptOutput, Reservation, StepResult
from kvrelay.node.engine_request import engine_request_from_wire
from kvrelay.node.node import Node
from kvrelay.node.receiver import Receiver, deadline_after
from kvrelay.v1 import prefill_node_pb2 as pb
from kvrelay.v1 import prefill_node_pb2_grpc
from prefill_node.leases import LeaseTable
from prefill_node.stall import StallWatch

_logger = logging.getLogger(__name__)
_MAX_LEASE_SECONDS = 600.0
_FORGET_SECONDS = 5.0  # that a failure waits at most for the store to be told what to forget


@dataclass(slots=True)
class _Prefill:
    """A request on this node. The stream sends what is in `events`; None ends it, an error fails it."""

    request: EngineRequest
    sources: tuple[HeldBlocks, ...]
    ends_at: float | None  # the request's deadline in loop time, if the router has sent one
    num_blocks: int  # of the given tokens, including a partial tail block
    events: asyncio.Queue[pb.PrefillEvent | KVRelayError | None] = field(default_factory=asyncio.Queue)
    prompt: PromptOutput | None = None
    first_tokens: list[TokenOutput] = field(default_factory=list)
    fetches: FetchReport = NOTHING_FETCHED
    accepted: bool = False  # the lease's time has begun
    finished: bool = False
    has_gap: bool = False  # publishing has failed for some blocks
    all_offered: bool = False  # to the connector, whether or not it has published them
    reception: asyncio.Task[None] | None = None


class PrefillService(prefill_node_pb2_grpc.PrefillNodeServicer):
    """The service of a prefill node. Everything here runs on the node's loop."""

    name = "kvrelay.v1.PrefillNode"
    role = NodeRole.PREFILL

    def __init__(self, node: Node, *, clock: Clock | None = None) -> None:
        self._node = node
        self._active: dict[str, _Prefill] = {}
        self._leases = LeaseTable(
            clock or MonotonicClock(), self._end_lease, on_sweep=self._look_for_stall, counts=node.lease_counts
        )
        self._stall_watch = StallWatch()
        self._look: asyncio.Future[EngineLoad] | None = None

    def attach(self, server: grpc.aio.Server) -> None:
        prefill_node_pb2_grpc.add_PrefillNodeServicer_to_server(self, server)

    def start(self) -> None:
        self._leases.start(self._node.crash)
        self._node.start(self._on_result, self._on_progress)

    async def close(self) -> None:
        for prefill in self._active.values():
            prefill.events.put_nowait(UnavailableError(f"{self._node.identity.node_id} is stopping"))
        await self._leases.close()

    # -- the service -------------------------------------------------------------------------------------------------

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> AsyncGenerator[pb.PrefillEvent, None]:
        self._node.require_accepting(request.epoch)
        engine_request = engine_request_from_wire(
            request,
            KVRole.PRODUCE,
            vocab_size=self._node.identity.vocab_size,
            max_model_len=self._node.engine_config.max_model_len,
            has_store=self._node.connector.has_store,
        )
        request_id = engine_request.request_id
        num_blocks = num_blocks_for(len(engine_request.given_token_ids), self._node.engine_config.block_size)
        if request_id in self._active or request_id in self._leases:
            raise InvalidRequestError(f"request {request_id} is running already", field="request_id")
        prefill = self._active[request_id] = _Prefill(
            engine_request, tuple(map(held_from_wire, request.sources)), deadline_after(request.timeout_ms), num_blocks
        )
        self._leases.open(request_id, math.inf)  # before the engine does, which may be in a long step
        self._node.activity.begin(request_id)  # until its stream and its lease end
        try:
            await self._node.engine_thread.call(lambda engine: engine.add(engine_request))
            self._leases.renew([request_id], _lease_seconds(request.lease_ttl_ms))  # by the router, once it hears of it
            prefill.accepted = True
            yield pb.PrefillEvent(accepted=pb.PrefillAccepted(lease_id=request_id))
            while (event := await prefill.events.get()) is not None:
                if isinstance(event, NotFiniteError):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_FORGET_SECONDS):
                            await self._node.all_published()  # who computes the prompt now finds no block in a store
                if isinstance(event, KVRelayError):
                    raise event
                yield event
        finally:
            event = None  # the frames of an error, of which this is one, must not refer to it
            self._close(request_id, prefill)

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.RenewLeasesResponse:
        unknown = self._leases.renew(request.lease_ids, _lease_seconds(request.ttl_ms))
        return pb.RenewLeasesResponse(unknown_lease_ids=unknown)

    async def ReleaseLeases(self, request: pb.ReleaseLeasesRequest, context: Context) -> pb.ReleaseLeasesResponse:
        self._leases.release(request.lease_ids)
        return pb.ReleaseLeasesResponse()

    def _close(self, request_id: str, prefill: _Prefill) -> None:
        del self._active[request_id]
        if prefill.reception is not None:
            prefill.reception.cancel()
            prefill.reception = None  # it refers to `prefill`, and the prompt would stay until a collection of garbage
        if not (prefill.accepted and prefill.finished):
            self._leases.release([request_id])
            self._node.engine_thread.post(lambda engine: engine.abort(request_id))
        self._end_activity(request_id)

    def _end_activity(self, request_id: str) -> None:
        if request_id not in self._active and request_id not in self._leases:
            self._node.activity.end(request_id)

    def _end_lease(self, lease_id: str) -> None:
        self._end_activity(lease_id)
        self._node.engine_thread.post(lambda engine: engine.release_lease(lease_id))

    def _look_for_stall(self) -> None:
        """Asks the engine how it is, unless it still owes an answer. Between two answers it makes a step if it can,
        whereas what it reports by itself stays the same for as long as a step takes."""
        if self._look is None:
            self._look = self._node.engine_thread.call(lambda engine: engine.load())
            self._look.add_done_callback(self._looked)

    def _looked(self, look: "asyncio.Future[EngineLoad]") -> None:
        self._look = None
        if not look.cancelled() and look.exception() is None:  # as it is once the engine has stopped
            self._end_stall(look.result())

    def _end_stall(self, load: EngineLoad) -> None:
        """Ends the oldest lease early if requests wait for blocks that leases hold. The lease's reader computes what it
        then misses."""
        if not self._stall_watch.is_stalled(load, self._node.lease_counts.released):
            return
        oldest = next((lease_id for lease_id in self._leases if lease_id not in self._active), None)
        if oldest is not None:
            _logger.warning("%d requests wait for blocks: lease %s ends early", load.num_requests_waiting, oldest)
            self._leases.end_early(oldest)

    # -- what the engine reports -------------------------------------------------------------------------------------

    def _on_result(self, result: StepResult) -> None:
        """Handles the results of a step. Those of a request whose stream has ended are ignored, but its reserved blocks
        are unpinned."""
        for reservation in result.reservations:
            self._receive(reservation)
        for prompt in result.prompts:
            if (prefill := self._active.get(prompt.request_id)) is not None:
                prefill.prompt = prompt
        for item in result.outputs:
            if (prefill := self._active.get(item.request_id)) is not None:
                self._on_first_token(prefill, item.output)
        for failure in result.failures:
            if (prefill := self._active.get(failure.request_id)) is not None:
                prefill.events.put_nowait(failure.error)

    def _on_first_token(self, prefill: _Prefill, output: TokenOutput) -> None:
        prefill.first_tokens.append(output)
        if len(prefill.first_tokens) < prefill.request.sampling.n:
            return
        assert prefill.prompt is not None
        event = pb.PrefillFinished(
            first_tokens=[output_to_wire(first) for first in prefill.first_tokens],
            prompt_logprobs=prompt_logprobs_to_wire(prefill.prompt.prompt_logprobs),
            num_cached_tokens=prefill.prompt.num_cached_tokens,
            fetches=fetch_report_to_wire(prefill.fetches),
        )
        prefill.finished = True
        prefill.events.put_nowait(pb.PrefillEvent(finished=event))
        self._end_if_done(prefill)

    def _on_progress(self, request_id: str, num_blocks: int, are_published: bool) -> None:
        prefill = self._active.get(request_id)
        if prefill is None:
            return
        prefill.has_gap |= not are_published
        if not prefill.has_gap:
            progress = pb.PrefillProgress(num_published_blocks=num_blocks)
            prefill.events.put_nowait(pb.PrefillEvent(progress=progress))
        prefill.all_offered = num_blocks == prefill.num_blocks
        self._end_if_done(prefill)

    def _end_if_done(self, prefill: _Prefill) -> None:
        if prefill.finished and prefill.all_offered:
            prefill.events.put_nowait(None)

    # -- blocks from other holders -----------------------------------------------------------------------------------

    def _receive(self, reservation: Reservation) -> None:
        prefill = self._active.get(reservation.request_id)
        if prefill is None:
            self._node.discard(reservation)
            return
        receiver = self._node.receiver(reservation, ends_at=prefill.ends_at)
        for held in prefill.sources:
            receiver.add_holder(held.source, held.num_blocks)
        receiver.end()
        reception = self._run_reception(reservation.request_id, prefill, receiver)
        prefill.reception = receiver.start(reception, prefill.events.put_nowait)

    async def _run_reception(self, request_id: str, prefill: _Prefill, receiver: Receiver) -> None:
        prefill.fetches = await receiver.run()
        self._node.engine_thread.post(lambda engine: engine.start(request_id))


def _lease_seconds(ttl_ms: int) -> float:
    return min(ttl_ms / 1000, _MAX_LEASE_SECONDS)
