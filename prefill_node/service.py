"""The prefill service. The life of a request:

1. `PrefillRequest` opens a lease under the request's own id and adds the request to the engine, which names every block
   that it computes. The lease's time begins when the engine has taken the request (`accepted`).
2. If other nodes hold leading blocks, or a store may, these are reserved and fetched first (`Receiver`); the engine
   computes the rest in chunks.
3. As soon as a chunk's blocks are published, the router is told how many leading blocks can be fetched (`progress`).
   Once publishing has failed, it is told no more: those behind are of no use without them. A connector that took some
   of the blocks has not failed, and the others are MISSING for their readers.
4. The first tokens are sampled from the prompt's last logits (`finished`); they do not wait for publication.
5. When the last block was offered to the connector, this is the last that the router hears (`ended`). The engine has
   then finished the request, and only the lease holds its blocks.
6. `Release`, expiry, or a stall of the node (`stall.py`) ends the lease. The blocks stay cached under their names until
   they are evicted.

`Release` before step 4, an error, the end of the router's stream, or of the request's time, also ends the request.

Invariant: a request that ends before `finished` leaves nothing behind; one that ends later leaves only the lease, whose
time has begun.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import grpc

from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import DeadlineError, InvalidRequestError, KVRelayError, NotFiniteError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.core.kv.source import HeldBlocks
from kvrelay.core.node_report import NOTHING_FETCHED, FetchReport, NodeRole
from kvrelay.core.rpc.calls import Context
from kvrelay.core.rpc.wire import fetch_report_to_wire, held_from_wire, output_to_wire, prompt_logprobs_to_wire
from kvrelay.core.tasks import begin_task
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.step_result import EngineLoad, PromptOutput, Reservation, StepResult
from kvrelay.node.engine_request import engine_request_from_wire
from kvrelay.node.node import Node
from kvrelay.node.receiver import Receiver, deadline_after
from kvrelay.v1 import prefill_node_pb2 as pb
from kvrelay.v1 import prefill_node_pb2_grpc
from prefill_node.leases import LeaseTable
from prefill_node.router_stream import RouterStream
from prefill_node.stall import StallWatch

_logger = logging.getLogger(__name__)
_MAX_LEASE_SECONDS = 600.0
_FORGET_SECONDS = 5.0  # that a failure waits at most for the store to be told what to forget
# When a request's time is over, its router says what it waited for, unless that hangs.
_DEADLINE_MARGIN_SECONDS = 1.0


@dataclass(slots=True, weakref_slot=True)
class _Prefill:
    """A request on this node, of which its router will have more events."""

    stream: RouterStream
    request: EngineRequest
    sources: tuple[HeldBlocks, ...]
    ends_at: float | None  # the request's deadline in loop time, if the router has sent one
    num_blocks: int  # of the given tokens, including a partial tail block
    lease_seconds: float
    prompt: PromptOutput | None = None
    first_tokens: list[TokenOutput] = field(default_factory=list)
    fetches: FetchReport = NOTHING_FETCHED
    accepted: bool = False  # the lease's time has begun
    finished: bool = False
    has_gap: bool = False  # publishing has failed for some blocks
    all_offered: bool = False  # to the connector, whether or not it has published them
    reception: asyncio.Task[None] | None = None
    failing: asyncio.Task[None] | None = None  # reports an error, the last of its events
    time_over: asyncio.TimerHandle | None = None


class PrefillService(prefill_node_pb2_grpc.PrefillNodeServicer):
    """The service of a prefill node. Everything here runs on the node's loop."""

    name = "kvrelay.v1.PrefillNode"
    role = NodeRole.PREFILL

    def __init__(self, node: Node, *, clock: Clock | None = None) -> None:
        self._node = node
        self._active: dict[str, _Prefill] = {}
        self._streams: list[RouterStream] = []
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
        for stream in self._streams:
            stream.close()
        for request_id in list(self._active):
            self._end(request_id)
        await self._leases.close()

    # -- the service -------------------------------------------------------------------------------------------------

    async def Serve(
        self, request_iterator: AsyncIterator[pb.PrefillCommands], context: Context
    ) -> AsyncIterator[pb.PrefillUpdate]:
        stream = RouterStream()
        self._streams.append(stream)
        reader = asyncio.get_running_loop().create_task(self._read(request_iterator, stream))
        try:
            async for update in stream.updates():
                yield update
            if reader.done():
                reader.result()  # raises what has ended it, if that was not the router
        finally:
            reader.cancel()
            self._streams.remove(stream)
            for request_id in list(stream.request_ids):
                self._end(request_id)

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.RenewLeasesResponse:
        unknown = self._leases.renew(request.lease_ids, _lease_seconds(request.ttl_ms))
        return pb.RenewLeasesResponse(unknown_lease_ids=unknown)

    async def _read(self, messages: AsyncIterator[pb.PrefillCommands], stream: RouterStream) -> None:
        try:
            async for message in messages:
                for command in message.commands:
                    self._handle(command, stream)
        finally:
            stream.close()

    def _handle(self, command: pb.PrefillCommand, stream: RouterStream) -> None:
        """Handles one command without waiting, since the commands of all other requests come after it."""
        match command.WhichOneof("command"):
            case "prefill":
                self._begin(command.prefill, stream)
            case "release":
                self._release(command.release.request_id)

    def _begin(self, message: pb.PrefillRequest, stream: RouterStream) -> None:
        request_id = message.request_id
        if request_id in stream.request_ids:
            _logger.error("request %s was sent twice; the second one is ignored", request_id)
            return
        try:
            self._node.require_accepting(message.epoch)
            request = engine_request_from_wire(
                message,
                KVRole.PRODUCE,
                vocab_size=self._node.identity.vocab_size,
                max_model_len=self._node.engine_config.max_model_len,
                has_store=self._node.connector.has_store,
            )
            if request_id in self._active or request_id in self._leases:
                raise InvalidRequestError(f"request {request_id} is running already", field="request_id")
        except KVRelayError as error:
            stream.send_failure(request_id, error)
            return
        num_blocks = num_blocks_for(len(request.given_token_ids), self._node.engine_config.block_size)
        prefill = self._active[request_id] = _Prefill(
            stream,
            request,
            tuple(map(held_from_wire, message.sources)),
            deadline_after(message.timeout_ms),
            num_blocks,
            _lease_seconds(message.lease_ttl_ms),
        )
        stream.request_ids.add(request_id)
        if prefill.ends_at is not None:
            prefill.time_over = asyncio.get_running_loop().call_at(
                prefill.ends_at + _DEADLINE_MARGIN_SECONDS,
                self._fail,
                request_id,
                DeadlineError("the request's time was over before its prompt was computed and published"),
            )
        self._leases.open(request_id, math.inf)  # before the engine does, which may be in a long step
        self._node.activity.begin(request_id)  # until it and its lease end
        added = self._node.engine_thread.call(lambda engine: engine.add(request))
        added.add_done_callback(partial(self._on_added, request_id))

    def _on_added(self, request_id: str, added: "asyncio.Future[None]") -> None:
        error = added.exception()
        prefill = self._active.get(request_id)
        if prefill is None:
            return
        if error is None:
            self._accept(prefill)
        elif isinstance(error, KVRelayError):
            self._fail(request_id, error)
        else:
            _logger.error("request %s was not taken", request_id, exc_info=error)
            self._fail(request_id, KVRelayError("internal error"))

    def _accept(self, prefill: _Prefill) -> None:
        """Has the lease's time begin, unless it has. A loop that was busy gets what the engine has done with the
        request before its answer that it has taken it."""
        if not prefill.accepted:
            request_id = prefill.request.request_id
            prefill.accepted = True
            self._leases.renew([request_id], prefill.lease_seconds)  # by the router, once it hears of it
            prefill.stream.send(pb.PrefillEvent(request_id=request_id, accepted=pb.PrefillAccepted()))

    def _release(self, request_id: str) -> None:
        prefill = self._active.get(request_id)
        if prefill is not None and not prefill.finished:
            self._end(request_id)
        self._leases.release([request_id])

    def _fail(self, request_id: str, error: KVRelayError) -> None:
        """Ends a request with an error, unless it is over."""
        prefill = self._active.get(request_id)
        if prefill is None or prefill.failing is not None:
            return
        if isinstance(error, NotFiniteError):
            failing = self._fail_when_forgotten(request_id, error)
            prefill.failing = begin_task(failing, name=f"request {request_id}: failing")
            return
        prefill.stream.send_failure(request_id, error)
        self._end(request_id)

    async def _fail_when_forgotten(self, request_id: str, error: NotFiniteError) -> None:
        """Ends a request with an error that tells who computes the prompt now that it finds no block in a store."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FORGET_SECONDS):
                await self._node.all_published()
        if (prefill := self._active.get(request_id)) is not None:
            prefill.failing = None  # not to be cancelled from within
            prefill.stream.send_failure(request_id, error)
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        """Ends a request, of which its router has no more events, and its lease unless it is finished."""
        prefill = self._active.pop(request_id)
        prefill.stream.request_ids.discard(request_id)
        if prefill.time_over is not None:
            prefill.time_over.cancel()
        for task in (prefill.reception, prefill.failing):
            if task is not None:
                task.cancel()
        prefill.reception = None  # it refers to `prefill`, and the prompt would stay until a collection of garbage
        if not prefill.finished:
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
        """Handles the results of a step. Those of a request that is over are ignored, but its reserved blocks are
        unpinned."""
        for reservation in result.reservations:
            self._receive(reservation)
        for prompt in result.prompts:
            if (prefill := self._find(prompt.request_id)) is not None:
                prefill.prompt = prompt
        for item in result.outputs:
            if (prefill := self._find(item.request_id)) is not None:
                self._on_first_token(prefill, item.output)
        for failure in result.failures:
            self._fail(failure.request_id, failure.error)

    def _on_first_token(self, prefill: _Prefill, output: TokenOutput) -> None:
        prefill.first_tokens.append(output)
        if len(prefill.first_tokens) < prefill.request.sampling.n:
            return
        assert prefill.prompt is not None
        self._accept(prefill)
        event = pb.PrefillFinished(
            first_tokens=[output_to_wire(first) for first in prefill.first_tokens],
            prompt_logprobs=prompt_logprobs_to_wire(prefill.prompt.prompt_logprobs),
            num_cached_tokens=prefill.prompt.num_cached_tokens,
            fetches=fetch_report_to_wire(prefill.fetches),
        )
        prefill.finished = True
        prefill.stream.send(pb.PrefillEvent(request_id=prefill.request.request_id, finished=event))
        self._end_if_done(prefill)

    def _on_progress(self, request_id: str, num_blocks: int, are_published: bool) -> None:
        prefill = self._find(request_id)
        if prefill is None:
            return
        self._accept(prefill)
        prefill.has_gap |= not are_published
        if not prefill.has_gap:
            progress = pb.PrefillProgress(num_published_blocks=num_blocks)
            prefill.stream.send(pb.PrefillEvent(request_id=request_id, progress=progress))
        prefill.all_offered = num_blocks == prefill.num_blocks
        self._end_if_done(prefill)

    def _end_if_done(self, prefill: _Prefill) -> None:
        if prefill.finished and prefill.all_offered:
            request_id = prefill.request.request_id
            prefill.stream.send(pb.PrefillEvent(request_id=request_id, ended=pb.PrefillEnded()))
            self._end(request_id)

    def _find(self, request_id: str) -> _Prefill | None:
        """Returns the request; None if it is over, or has only an error to tell."""
        prefill = self._active.get(request_id)
        return None if prefill is None or prefill.failing is not None else prefill

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
        prefill.reception = receiver.start(reception, partial(self._fail, reservation.request_id))

    async def _run_reception(self, request_id: str, prefill: _Prefill, receiver: Receiver) -> None:
        prefill.fetches = await receiver.run()
        self._node.engine_thread.post(lambda engine: engine.start(request_id))


def _lease_seconds(ttl_ms: int) -> float:
    return min(ttl_ms / 1000, _MAX_LEASE_SECONDS)
