"""The decode service. The life of a request:

1. `Admit` adds the request to the engine, with its output so far if it began on another node. With `local_prefill` no
   other command follows: blocks that others hold are fetched first, the rest is computed (then `prompt_computed`
   reports how much was fetched), and the stream brings the tokens from the first new one on.
2. Otherwise the engine reserves every block that the given tokens need (`admitted`), of which some may be here already.
3. `Pull` says which blocks can be fetched; a `Receiver` fetches them, and the connector verifies them, while the
   prefill node computes the next chunk. Blocks that do not arrive are requested from other holders, then from the
   store. Those that nobody has are reported to the router (`kv_missing`), which names another prefill node or says that
   no more will come. After a damaged block from a node nothing is reported: what is missing is computed here.
4. `Start` brings the first tokens. When every block is here, or no more will come, the engine continues from them
   (`kv_ready`) and computes the blocks that did not arrive.
5. An engine step sends each router its new tokens, in one message or a few; those of steps shorter than
   `--stream-interval` travel together. This goes on until every output has a finish reason.
   `Finish` ends one of them earlier, because the client needs no more of it.
6. `Abort`, or the end of the router's stream, ends a request at any point and frees everything that it held. So does
   the end of its time while it waits for blocks or first tokens. With `distrust`, because a prefill node got logits
   that are not finite, `Abort` also has nobody find the request's blocks any more.

Invariant: a request is known here from its `Admit` until its last output, failure or abort, and holds nothing
afterwards.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc

from decode_node.router_stream import RouterStream
from kvrelay.core.errors import DeadlineError, InvalidRequestError, KVRelayError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.kv.source import HeldBlocks
from kvrelay.core.node_report import NOTHING_FETCHED, FetchReport, NodeRole
from kvrelay.core.rpc.calls import Context
from kvrelay.core.rpc.wire import fetch_report_to_wire, held_from_wire, output_from_wire, source_from_wire
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.step_result import Reservation, StepResult
from kvrelay.node.engine_request import engine_request_from_wire
from kvrelay.node.node import Node
from kvrelay.node.receiver import Receiver, deadline_after
from kvrelay.v1 import decode_node_pb2 as pb
from kvrelay.v1 import decode_node_pb2_grpc

_logger = logging.getLogger(__name__)


def _new_future() -> "asyncio.Future[tuple[TokenOutput, ...]]":
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class _Decode:
    """A request on this node. `receiver` is set once the engine has admitted a request whose KV is fetched."""

    stream: RouterStream
    request: EngineRequest
    sources: tuple[HeldBlocks, ...]
    ends_at: float | None  # the request's deadline in loop time, if the router has sent one
    num_unfinished: int
    fetches: FetchReport = NOTHING_FETCHED
    receiver: Receiver | None = None
    pulls: list[pb.Pull] = field(default_factory=list)
    first_tokens: asyncio.Future[tuple[TokenOutput, ...]] = field(default_factory=_new_future)
    reception: asyncio.Task[None] | None = None


class DecodeService(decode_node_pb2_grpc.DecodeNodeServicer):
    """The service of a decode node. Everything here runs on the node's loop."""

    name = "kvrelay.v1.DecodeNode"
    role = NodeRole.DECODE

    def __init__(self, node: Node) -> None:
        self._node = node
        self._active: dict[str, _Decode] = {}
        self._streams: list[RouterStream] = []

    def attach(self, server: grpc.aio.Server) -> None:
        decode_node_pb2_grpc.add_DecodeNodeServicer_to_server(self, server)

    def start(self) -> None:
        self._node.start(self._on_result)

    async def close(self) -> None:
        for stream in self._streams:
            stream.close()
        for request_id in list(self._active):
            self._abort(request_id)

    # -- the service -------------------------------------------------------------------------------------------------

    async def Serve(
        self, request_iterator: AsyncIterator[pb.DecodeCommands], context: Context
    ) -> AsyncIterator[pb.DecodeUpdate]:
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
            for request_id in stream.request_ids:
                self._abort(request_id)

    async def _read(self, messages: AsyncIterator[pb.DecodeCommands], stream: RouterStream) -> None:
        try:
            async for message in messages:
                for command in message.commands:
                    self._handle(command, stream)
        finally:
            stream.close()

    def _handle(self, command: pb.DecodeCommand, stream: RouterStream) -> None:
        """Handles one command without waiting, since the commands of all other requests come after it."""
        match command.WhichOneof("command"):
            case "admit":
                self._admit(command.admit, stream)
            case "pull":
                self._pull(command.pull, stream)
            case "start":
                self._start(command.start, stream)
            case "finish":
                self._finish(command.finish.request_id, command.finish.index, stream)
            case "abort":
                if self._find(command.abort.request_id, stream) is not None:
                    self._abort(command.abort.request_id, distrust=command.abort.distrust)

    def _find(self, request_id: str, stream: RouterStream) -> _Decode | None:
        """Returns the request if it belongs to this stream; None if it is over or another router's."""
        decode = self._active.get(request_id)
        return decode if decode is not None and decode.stream is stream else None

    def _admit(self, admit: pb.Admit, stream: RouterStream) -> None:
        if self._find(admit.request_id, stream) is not None:
            _logger.error("request %s was admitted twice; the second one is ignored", admit.request_id)
            return
        try:
            self._node.require_accepting(admit.epoch)
            if admit.request_id in self._active:
                raise InvalidRequestError(f"another router runs a request {admit.request_id}", field="request_id")
            request = engine_request_from_wire(
                admit,
                KVRole.LOCAL if admit.local_prefill else KVRole.CONSUME,
                vocab_size=self._node.identity.vocab_size,
                max_model_len=self._node.engine_config.max_model_len,
                has_store=self._node.connector.has_store,
            )
        except KVRelayError as error:
            stream.send_failure(admit.request_id, error)
            return
        self._active[request.request_id] = _Decode(
            stream,
            request,
            tuple(map(held_from_wire, admit.sources)),
            deadline_after(admit.timeout_ms),
            request.sampling.n,
        )
        stream.begin(request.request_id)
        self._node.activity.begin(request.request_id)
        added = self._node.engine_thread.call(lambda engine: engine.add(request))
        added.add_done_callback(partial(self._on_added, request.request_id))

    def _on_added(self, request_id: str, added: "asyncio.Future[None]") -> None:
        error = added.exception()
        if isinstance(error, KVRelayError):
            self._fail(request_id, error)
        elif error is not None:
            _logger.error("request %s was not admitted", request_id, exc_info=error)
            self._fail(request_id, KVRelayError("internal error"))

    def _pull(self, pull: pb.Pull, stream: RouterStream) -> None:
        decode = self._find(pull.request_id, stream)
        if decode is None:
            return
        if decode.receiver is None:
            decode.pulls.append(pull)  # not admitted yet
        else:
            _announce(decode.receiver, pull)

    def _start(self, start: pb.Start, stream: RouterStream) -> None:
        decode = self._find(start.request_id, stream)
        if decode is None or decode.first_tokens.done():
            return
        first_tokens = tuple(output_from_wire(output) for output in start.first_tokens)
        if _can_start(first_tokens, choices=decode.request.choices, vocab_size=self._node.identity.vocab_size):
            decode.first_tokens.set_result(first_tokens)
        else:
            self._give_up(start.request_id, KVRelayError("the first tokens are not those of the request's outputs"))

    def _finish(self, request_id: str, index: int, stream: RouterStream) -> None:
        if self._find(request_id, stream) is not None:
            self._node.engine_thread.post(lambda engine: engine.finish(request_id, index))

    def _abort(self, request_id: str, *, distrust: bool = False) -> None:
        self._forget(request_id)
        self._node.engine_thread.post(lambda engine: engine.abort(request_id, distrust=distrust))

    def _give_up(self, request_id: str, error: KVRelayError) -> None:
        """Ends a request that the engine may still have with an error."""
        self._node.engine_thread.post(lambda engine: engine.abort(request_id))
        self._fail(request_id, error)

    def _fail(self, request_id: str, error: KVRelayError) -> None:
        """Ends a request with an error, unless it is over. The engine holds nothing for it any more, or was told to
        abort it."""
        if request_id in self._active:
            self._active[request_id].stream.send_failure(request_id, error)
            self._forget(request_id)

    def _forget(self, request_id: str) -> _Decode:
        decode = self._active.pop(request_id)
        decode.stream.end(request_id)
        self._node.activity.end(request_id)
        if decode.reception is not None:
            decode.reception.cancel()
            decode.reception = None  # it refers to `decode`, and the prompt would stay until a collection of garbage
        return decode

    # -- KV that arrives ---------------------------------------------------------------------------------------------

    def _receive(self, reservation: Reservation) -> None:
        decode = self._active.get(reservation.request_id)
        if decode is None:
            self._node.discard(reservation)
            return
        receiver = self._node.receiver(
            reservation, on_missing=partial(self._on_missing, reservation.request_id), ends_at=decode.ends_at
        )
        decode.receiver = receiver
        for held in decode.sources:
            receiver.add_holder(held.source, held.num_blocks)
        for pull in decode.pulls:
            _announce(receiver, pull)
        is_local = decode.request.role is KVRole.LOCAL
        if is_local:
            receiver.end()
        reception = self._run_reception(decode, receiver, reservation)
        decode.reception = receiver.start(reception, partial(self._give_up, reservation.request_id))
        if not is_local:
            decode.stream.send(pb.DecodeEvent(request_id=reservation.request_id, admitted=pb.Admitted()))

    def _on_missing(self, request_id: str, num_tokens: int) -> None:
        decode = self._active.get(request_id)
        if decode is not None:
            missing = pb.KVMissing(num_missing_tokens=num_tokens)
            decode.stream.send(pb.DecodeEvent(request_id=request_id, kv_missing=missing))

    async def _run_reception(self, decode: _Decode, receiver: Receiver, reservation: Reservation) -> None:
        """Starts the request when its KV and its first tokens are here, or ends it when its time is over. So does its
        router, unless that hangs; then nobody else would give the blocks back."""
        try:
            async with asyncio.timeout_at(decode.ends_at):
                await self._receive_and_start(decode, receiver, reservation)
        except TimeoutError:
            self._give_up(reservation.request_id, DeadlineError("the request's time was over before it could begin"))

    async def _receive_and_start(self, decode: _Decode, receiver: Receiver, reservation: Reservation) -> None:
        request_id = reservation.request_id
        fetches = decode.fetches = await receiver.run()
        if decode.request.role is KVRole.LOCAL:
            self._node.engine_thread.post(lambda engine: engine.start(request_id))
            return
        first_tokens = await decode.first_tokens
        decode.num_unfinished = sum(output.finish_reason is None for output in first_tokens)
        self._node.engine_thread.post(lambda engine: engine.start(request_id, first_tokens))
        num_given_tokens = len(decode.request.given_token_ids)
        ready = pb.KVReady(
            num_recomputed_tokens=num_given_tokens - reservation.num_cached_tokens - fetches.num_tokens,
            fetches=fetch_report_to_wire(fetches),
        )
        decode.stream.send(pb.DecodeEvent(request_id=request_id, kv_ready=ready))

    # -- what the engine reports -------------------------------------------------------------------------------------

    def _on_result(self, result: StepResult) -> None:
        for reservation in result.reservations:
            self._receive(reservation)
        for prompt in result.prompts:
            if (decode := self._active.get(prompt.request_id)) is not None:
                with_logprobs = decode.request.sampling.prompt_logprobs is not None
                decode.stream.send_prompt(prompt, decode.fetches, with_logprobs=with_logprobs)
        for item in result.outputs:
            self._send_output(item.request_id, item.output)
        for failure in result.failures:
            self._fail(failure.request_id, failure.error)

    def _send_output(self, request_id: str, output: TokenOutput) -> None:
        decode = self._active.get(request_id)
        if decode is None:
            return
        decode.stream.send_output(request_id, output)
        if output.finish_reason is not None:
            decode.num_unfinished -= 1
            if decode.num_unfinished == 0:
                self._forget(request_id)


def _announce(receiver: Receiver, pull: pb.Pull) -> None:
    if pull.HasField("source"):
        receiver.announce(source_from_wire(pull.source), pull.num_blocks, ended=pull.ended)
    if pull.final:
        receiver.end()


def _can_start(first_tokens: Sequence[TokenOutput], *, choices: range, vocab_size: int) -> bool:
    """Tells whether the first tokens are valid: one token each, for different outputs of the request, of which at least
    one is not finished."""
    indices = {output.index for output in first_tokens}
    return (
        len(indices) == len(first_tokens)
        and all(index in choices for index in indices)
        and all(len(output.token_ids) == 1 and output.token_ids[0] < vocab_size for output in first_tokens)
        and any(output.finish_reason is None for output in first_tokens)
    )
