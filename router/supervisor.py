"""The supervisor of one request: owns both of its legs, from placement to the trace. Life of a request here:

1. The relay has chosen a decode node D and a prefill node P, or D alone (`local_prefill`).
2. D is told to admit the request, P to prefill it, at the same time. P answers with a lease, which is renewed by
   heartbeat from then on.
3. P reports published blocks (`PrefillProgress`); each report goes on to D as a pull.
4. P reports the first token of every output (`PrefillFinished`). They go to the client at once and to D as the start of
   decoding; nothing waits for the transfer. Outputs that end with their first token are over; if all do, D is told to
   forget the request.
5. P's stream ends: everything is published, D hears that no more will come.
6. D has its KV (`KVReady`): the lease is released.
7. D's tokens go to the client until every output has a finish reason. The trace follows.

When P fails before its first tokens, D prefills by itself (the first rung of the failure ladder). When it fails later,
D computes what it could not fetch. Any other failure ends the request with one error.

Everything that happens, the deadline and an abort included, is a message in one inbox, taken in order. Invariant: the
events end with exactly one of RequestTrace, a KVRelayError, or the consumer's close; after each of them D has forgotten
the request or was told to, P's stream is over and its lease released. The clean-up waits for nothing, so that no
cancellation can interrupt it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from kvrelay.core.clock import Clock
from kvrelay.core.errors import CancelledByPeerError, DeadlineError, InvalidRequestError, KVRelayError
from kvrelay.core.outputs import TokenOutput
from router.decode_client import Admitted, DecodeClient, DecodeEvent, DecodeFailed, DecodeSession, KVReady
from router.node import KVSource, NodeHandle
from router.prefill_client import (
    HeldBlocks,
    PrefillAccepted,
    PrefillClient,
    PrefillEnded,
    PrefillEvent,
    PrefillFinished,
    PrefillProgress,
)
from router.request import PromptLogprobs, RequestEvent, RoutedRequest
from router.tally import Tally

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodePlacement:
    """Where to decode. `node_id` as it was when the request was placed. `num_uncached_tokens`: its work if it prefills
    by itself."""

    node: NodeHandle
    client: DecodeClient
    node_id: str
    num_uncached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillPlacement:
    """Where to prefill. `source`: where D fetches from. `sources`: where P may fetch from. `num_uncached_tokens`: P's
    share of work."""

    node: NodeHandle
    client: PrefillClient
    source: KVSource
    sources: tuple[HeldBlocks, ...]
    num_uncached_tokens: int


@dataclass(frozen=True, slots=True)
class _Ended:
    """The request is over from outside: deadline or abort."""

    error: KVRelayError


@dataclass(frozen=True, slots=True)
class _Satisfied:
    """The client wants no more of this output."""

    index: int


_Message = PrefillEvent | DecodeEvent | _Ended | _Satisfied


class RequestSupervisor:
    """One request, one `run`. `wire_id` names it at the nodes and is never used twice; times are read from `clock`."""

    def __init__(
        self,
        request: RoutedRequest,
        wire_id: str,
        decode: DecodePlacement,
        prefill: PrefillPlacement | None,
        *,
        block_size: int,
        clock: Clock,
    ) -> None:
        self._request = request
        self._wire_id = wire_id
        self._decode = decode
        self._prefill = prefill  # None from the moment D prefills by itself
        self._inbox: asyncio.Queue[_Message] = asyncio.Queue()
        self._tally = Tally(request, block_size, clock)
        self._unfinished = set(range(request.sampling.n))
        self._session: DecodeSession | None = None
        self._prefill_task: asyncio.Task[None] | None = None
        self._lease_id: str | None = None
        self._num_published_blocks = 0
        self._has_first_tokens = False
        self._decode_is_done = False
        self._charged: tuple[NodeHandle, int] | None = None  # who computes the prompt, and how much of it
        self._deadline: asyncio.TimerHandle | None = None

    async def run(self) -> AsyncGenerator[RequestEvent, None]:
        """As `Relay.run`."""
        try:
            self._open()
            while self._unfinished:
                message = await self._inbox.get()
                for event in self._take(message):
                    yield event
            yield self._tally.trace(
                prefill_node=self._prefill.source.node_id if self._prefill else None, decode_node=self._decode.node_id
            )
        finally:
            self._close()

    def finish(self, index: int) -> None:
        """As `Relay.finish`."""
        self._inbox.put_nowait(_Satisfied(index))

    def abort(self, error: KVRelayError | None = None) -> None:
        """End the request with an error; by default that the client gave it up."""
        self._inbox.put_nowait(_Ended(error or CancelledByPeerError(f"request {self._request.request_id} was aborted")))

    # -- what happens --------------------------------------------------------------------------------------------------

    def _take(self, message: _Message) -> Sequence[RequestEvent]:
        """What a message means for the client. Raises the error that ends the request."""
        match message:
            case PrefillAccepted() | PrefillProgress() | PrefillFinished() | PrefillEnded() if self._prefill is None:
                pass  # was in the inbox already when the prefill was given up
            case TokenOutput():
                return self._on_tokens(message)
            case PrefillAccepted(lease_id):
                self._on_lease(lease_id)
            case PrefillProgress(num_published_blocks):
                self._num_published_blocks = num_published_blocks
                self._pull(final=False)
            case PrefillFinished():
                return self._on_first_tokens(message)
            case PrefillEnded(error):
                self._on_prefill_ended(error)
            case Admitted(num_cached_tokens):
                self._tally.accepted()
                if self._prefill is None:
                    self._tally.prompt_computed(num_cached_tokens=num_cached_tokens)
            case KVReady():
                self._on_kv_ready(message)
            case PromptLogprobs():
                return (message,)
            case _Satisfied(index):
                self._unfinished.discard(index)
            case DecodeFailed(error) | _Ended(error):
                raise error
        return ()

    def _on_tokens(self, output: TokenOutput) -> Sequence[RequestEvent]:
        if output.index not in self._unfinished:
            return ()
        self._uncharge()
        self._tally.first_token()
        if output.finish_reason is not None:
            self._unfinished.discard(output.index)
            self._decode_is_done = not self._unfinished
        return (output,)

    def _on_lease(self, lease_id: str) -> None:
        assert self._prefill is not None
        self._lease_id = lease_id
        self._prefill.client.hold(lease_id)
        self._tally.accepted()

    def _on_first_tokens(self, finished: PrefillFinished) -> Sequence[RequestEvent]:
        assert self._session is not None
        if {output.index for output in finished.first_tokens} != self._unfinished:
            self._fall_back(KVRelayError("the prefill node did not answer with the first token of every output"))
            return ()
        self._uncharge()
        self._has_first_tokens = True
        self._tally.first_token()
        self._tally.prompt_computed(
            num_cached_tokens=finished.num_cached_tokens, num_fetched_tokens=finished.num_fetched_tokens
        )
        self._unfinished = {output.index for output in finished.first_tokens if output.finish_reason is None}
        if self._unfinished:
            self._session.start(finished.first_tokens)
        if self._request.sampling.prompt_logprobs is None:
            return finished.first_tokens
        return (PromptLogprobs(finished.prompt_logprobs), *finished.first_tokens)

    def _on_prefill_ended(self, error: KVRelayError | None) -> None:
        if not self._has_first_tokens:
            self._fall_back(error or KVRelayError("the prefill node ended without a first token"))
            return
        if error is not None:
            _logger.warning("request %s: the prefill node failed after its first token: %s", self._wire_id, error)
        self._pull(final=True)

    def _on_kv_ready(self, ready: KVReady) -> None:
        self._tally.accepted()
        if self._prefill is None:
            self._tally.prompt_computed(num_cached_tokens=ready.num_cached_tokens)
            return
        self._tally.decode_ready(
            num_fetched_tokens=ready.num_fetched_tokens, num_recomputed_tokens=ready.num_recomputed_tokens
        )
        if self._has_first_tokens:  # before that the prefill still needs its blocks
            self._release_lease()

    def _pull(self, *, final: bool) -> None:
        assert self._prefill is not None and self._session is not None
        self._session.pull(self._prefill.source, self._num_published_blocks, final=final)

    def _fall_back(self, error: KVRelayError) -> None:
        """The next rung after a prefill that failed before its first tokens: the decode node prefills. Raises what no
        other node would do better."""
        if isinstance(error, InvalidRequestError | DeadlineError):
            raise error
        assert self._session is not None
        _logger.warning("request %s: %s prefills by itself: %s", self._wire_id, self._decode.node_id, error)
        self._close_prefill()
        self._prefill = None
        self._charge(self._decode.node, self._decode.num_uncached_tokens)
        self._session.close(finished=False)
        self._admit(f"{self._wire_id}.local", local_prefill=True)

    # -- opening and closing -------------------------------------------------------------------------------------------

    def _open(self) -> None:
        timeout = self._request.timeout
        error = DeadlineError(f"the request took longer than {timeout:g} seconds")
        self._deadline = asyncio.get_running_loop().call_later(timeout, self.abort, error)
        self._decode.node.num_sequences += self._request.sampling.n
        self._admit(self._wire_id, local_prefill=self._prefill is None)
        if self._prefill is None:
            self._charge(self._decode.node, self._decode.num_uncached_tokens)
        else:
            self._charge(self._prefill.node, self._prefill.num_uncached_tokens)
            self._prefill_task = self._prefill.client.prefill(
                self._wire_id, self._request, self._prefill.sources, timeout=timeout, sink=self._inbox.put_nowait
            )

    def _admit(self, wire_id: str, *, local_prefill: bool) -> None:
        self._session = self._decode.client.open(wire_id, self._inbox.put_nowait)
        self._session.admit(self._request, local_prefill=local_prefill)

    def _close(self) -> None:
        """In every ending. Nothing here waits or fails."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._decode.node.num_sequences -= self._request.sampling.n
        if self._session is not None:
            self._session.close(finished=self._decode_is_done)
        self._close_prefill()

    def _close_prefill(self) -> None:
        self._uncharge()
        if self._prefill_task is not None:
            self._prefill_task.cancel()
        self._release_lease()

    def _charge(self, node: NodeHandle, num_tokens: int) -> None:
        """Until the first tokens are here, this much more is queued there."""
        node.num_queued_tokens += num_tokens
        self._charged = (node, num_tokens)

    def _uncharge(self) -> None:
        if self._charged is not None:
            node, num_tokens = self._charged
            node.num_queued_tokens -= num_tokens
            self._charged = None

    def _release_lease(self) -> None:
        if self._lease_id is not None and self._prefill is not None:
            self._prefill.client.release(self._lease_id)
            self._lease_id = None
