"""The router's side of a decode node: one bidirectional stream that carries all of its requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import grpc

from kvrelay.core.errors import KVRelayError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.source import HeldBlocks, KVSource
from kvrelay.core.node_report import FetchReport
from kvrelay.core.rpc.errors import error_from_status
from kvrelay.core.rpc.wire import (
    fetch_report_from_wire,
    held_to_wire,
    output_from_wire,
    output_to_wire,
    prompt_logprobs_from_wire,
    sampling_to_wire,
    source_to_wire,
)
from kvrelay.v1 import decode_node_pb2 as pb
from kvrelay.v1 import decode_node_pb2_grpc
from router.relay.node_stream import NodeStream
from router.request import NodeRequest


@dataclass(frozen=True, slots=True)
class Admitted:
    """The node, which does not prefill by itself, has reserved the prompt's blocks."""


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The node has computed the prompt by itself, of which it held `num_cached_tokens` tokens, after these fetches."""

    num_cached_tokens: int
    fetches: FetchReport


@dataclass(frozen=True, slots=True)
class KVReady:
    """The node has all KV that was going to arrive."""

    num_recomputed_tokens: int
    fetches: FetchReport


@dataclass(frozen=True, slots=True)
class KVMissing:
    """No source that the node knows of has the blocks of so many tokens. The node waits for an answer."""

    num_missing_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """The request has failed at the node. This is its last event."""

    error: KVRelayError


DecodeEvent = Admitted | PromptComputed | KVMissing | KVReady | TokenOutput | PromptLogprobs | DecodeFailed
Sink = Callable[[DecodeEvent], None]


_Stream = NodeStream[pb.DecodeCommand, pb.DecodeEvent, DecodeEvent]


class DecodeSession:
    """One request on a decode node. All methods return at once; events go to the sink that was given to `open`."""

    def __init__(self, stream: _Stream, wire_id: str) -> None:
        self._stream = stream
        self._wire_id = wire_id
        self._distrusts = False

    def admit(
        self,
        node_request: NodeRequest,
        *,
        epoch: int,
        local_prefill: bool,
        yields_to_decodes: bool,
        timeout: float,
        sources: Sequence[HeldBlocks],
    ) -> None:
        """Asks the node, if it is the process of this epoch, to reserve the prompt's blocks. `sources`: other holders
        of leading blocks, best first. `timeout`: seconds that the request has left. `yields_to_decodes`: a local
        prefill is not to make the steps of others much longer."""
        admit = pb.Admit(
            request_id=self._wire_id,
            epoch=epoch,
            sampling_params=sampling_to_wire(node_request.sampling),
            priority=node_request.priority,
            cache_salt=node_request.cache_salt,
            local_prefill=local_prefill,
            yields_to_decodes=yields_to_decodes,
            num_prior_output_tokens=node_request.num_prior_output_tokens,
            first_choice_index=node_request.first_choice_index,
            sources=[held_to_wire(held) for held in sources],
            timeout_ms=max(1, round(timeout * 1000)),
        )
        command = pb.DecodeCommand(admit=admit)
        command.admit.prompt_token_ids.extend(node_request.token_ids)  # here, because the line above makes a copy
        self._stream.send(command)

    def pull(self, source: KVSource, num_blocks: int, *, ended: bool) -> None:
        """Tells the node that `source` has published the prompt's first `num_blocks` blocks; with `ended`, that it will
        publish no more."""
        pull = pb.Pull(request_id=self._wire_id, source=source_to_wire(source), num_blocks=num_blocks, ended=ended)
        self._stream.send(pb.DecodeCommand(pull=pull))

    def pull_no_more(self) -> None:
        """Tells the node to compute what it has not got by now: no source will announce more."""
        self._stream.send(pb.DecodeCommand(pull=pb.Pull(request_id=self._wire_id, final=True)))

    def start(self, first_tokens: tuple[TokenOutput, ...]) -> None:
        """Gives the node the first token of every output, to decode from."""
        start = pb.Start(request_id=self._wire_id, first_tokens=[output_to_wire(output) for output in first_tokens])
        self._stream.send(pb.DecodeCommand(start=start))

    def finish(self, index: int) -> None:
        """Tells the node to end one output, of which it has sent tokens, while others go on."""
        self._stream.send(pb.DecodeCommand(finish=pb.Finish(request_id=self._wire_id, index=index)))

    def distrust(self) -> None:
        """Has `close` tell the node, when it aborts the request, that KV which it was given may be wrong."""
        self._distrusts = True

    def close(self, *, finished: bool) -> None:
        """Ends the session's events, and aborts the request at the node unless it is `finished` or has failed there.
        Idempotent."""
        if self._stream.remove(self._wire_id) and not finished:
            abort = pb.Abort(request_id=self._wire_id, distrust=self._distrusts)
            self._stream.send(pb.DecodeCommand(abort=abort))


class DecodeClient:
    """One per decode node. Its stream is opened for the first request, and anew for the first request after it
    broke."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = cast("decode_node_pb2_grpc.DecodeNodeAsyncStub", decode_node_pb2_grpc.DecodeNodeStub(channel))
        self._name = f"decode node {address}"
        self._stream: _Stream | None = None

    def open(self, wire_id: str, sink: Sink) -> DecodeSession:
        """Opens a session, whose events go to `sink`. A `wire_id` is used only once. If the node cannot be reached, the
        sink gets a DecodeFailed."""
        if self._stream is None or self._stream.broken:
            self._stream = NodeStream(
                self._stub.Serve,
                self._name,
                message_of=lambda commands: pb.DecodeCommands(commands=commands),
                event_from_wire=_event_from_wire,
                failed=DecodeFailed,
                is_last=lambda event: isinstance(event, DecodeFailed),
            )
        self._stream.add(wire_id, sink)
        return DecodeSession(self._stream, wire_id)

    def lose(self, error: KVRelayError) -> None:
        """Fails all sessions at once, because the node is lost although its stream has not broken."""
        if self._stream is not None:
            self._stream.lose(error)

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.close()


def _event_from_wire(message: pb.DecodeEvent) -> DecodeEvent | None:
    """Returns None for an event of a newer protocol. Raises KVRelayError for one that breaks the protocol."""
    match message.WhichOneof("event"):
        case "tokens":
            return output_from_wire(message.tokens)
        case "admitted":
            return Admitted()
        case "prompt_computed":
            computed = message.prompt_computed
            fetches = fetch_report_from_wire(computed.fetches)
            return PromptComputed(computed.num_cached_tokens, fetches)
        case "kv_ready":
            ready = message.kv_ready
            fetches = fetch_report_from_wire(ready.fetches)
            return KVReady(ready.num_recomputed_tokens, fetches)
        case "kv_missing":
            return KVMissing(message.kv_missing.num_missing_tokens)
        case "prompt_logprobs":
            return prompt_logprobs_from_wire(message.prompt_logprobs)
        case "failed":
            return DecodeFailed(error_from_status(message.failed.status))
        case _:
            return None
