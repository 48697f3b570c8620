"""One attempt to serve some outputs of a request at one decode node D, and at one prefill node P or none. Its life:

1. D and P have been chosen, or D alone (`local_prefill`).
2. D is told to admit and P to prefill, at the same time. P answers with a lease, which is renewed at intervals from
   then on. D hears nothing of outputs that end with their first tokens: steps 3, 5 and 6 are not for them.
3. P reports published blocks (`PrefillProgress`). Each report is forwarded to D as a pull.
4. P reports the first new token of every output (`PrefillFinished`). These tokens go to the client at once, and to D as
   the start of decoding; nothing waits for the transfer. Outputs that end with this token are over; if all are, D is
   told to abort the request.
5. P's events end, because P has published what it could or because it has failed. D is told that P announces no more.
   a. D reports what it could fetch neither from P nor from the other holders and the store it knows of (`KVMissing`),
      unless a node has sent it a damaged block: then it computes what it misses.
   b. Once per attempt, another prefill node is asked for it (`Refill`). Its announcements are forwarded to D as well.
   c. If there is no other node, or it fails too, or it could send the blocks only through the store that has failed D,
      D is told that no more will come, and computes what it misses.
6. D has its KV (`KVReady`). The leases are released.
7. D's tokens go to the client until every output has a finish reason or the client needs no more of it. D is told to
   end such an output as soon as it has sent a token of it, while the client waits for others.

If P fails before step 4, or D is lost at any time, the attempt has failed (`NodeLostError`) and the supervisor makes
another one. If P, or the node of a refill, has failed because its logits are not finite, the KV that D has fetched may
be why. That fails the attempt, too, and D is told to distrust that KV when it is told to abort the request, before it
hears of another attempt.

Invariant: once an attempt is closed, D is done with the request or was told to abort it, and P and the node of a refill
were told to release their leases. Nothing here waits, so no cancellation can interrupt it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.errors import DeadlineError, InvalidRequestError, KVRelayError, NotFiniteError, UnavailableError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import NodeRole
from router.nodes.node import NodeHandle
from router.relay.charge import Charge
from router.relay.decode_client import (
    Admitted,
    DecodeEvent,
    DecodeFailed,
    DecodeSession,
    KVMissing,
    KVReady,
    PromptComputed,
)
from router.relay.loss import Loss, NodeLostError
from router.relay.prefill_client import (
    PrefillAccepted,
    PrefillEnded,
    PrefillEvent,
    PrefillFinished,
    PrefillProgress,
)
from router.relay.recovery_metrics import Rung
from router.relay.refill import Refill, blocks_only
from router.relay.resolved_placement import PrefillPlacement, ResolvedPlacement
from router.relay.supply import Supply
from router.relay.tally import Tally
from router.request import NodeRequest

_logger = logging.getLogger(__name__)

ClientEvent = TokenOutput | PromptLogprobs


class PlaceRefill(Protocol):
    """A function that chooses a prefill node other than `source` for blocks of `num_missing_tokens` tokens that no node
    has and `reader` (D) needs; None if D shall compute them."""

    def __call__(
        self, node_request: NodeRequest, source: KVSource, *, reader: NodeHandle, num_missing_tokens: int
    ) -> PrefillPlacement | None: ...


@dataclass(frozen=True, slots=True)
class RefillEvent:
    """An event of the second prefill node."""

    event: PrefillEvent


AttemptEvent = PrefillEvent | DecodeEvent | RefillEvent


class Attempt:
    """One attempt: the owner calls `open`, then `take` with each event that the sink is given, then `close`.

    `wire_id` names the attempt at the nodes and is never used twice. `unfinished` has the indices of the outputs that
    the client still waits for. `time_left` returns the seconds that the request has left."""

    def __init__(
        self,
        node_request: NodeRequest,
        wire_id: str,
        placement: ResolvedPlacement,
        tally: Tally,
        *,
        place_refill: PlaceRefill,
        time_left: Callable[[], float],
    ) -> None:
        self.closed = False
        self.unfinished = set(node_request.choices)
        self.prefill_node: str | None = None  # the id of the node that sampled the first new tokens
        self.decode_node = placement.decode.source.node_id
        self._outage = f"moving KV to {self.decode_node}"
        self._node_request = node_request
        self._wire_id = wire_id
        self._decode = placement.decode
        self._prefill = placement.prefill
        self._charge = Charge(placement.decode)  # until its first tokens have come, if D prefills
        self._yields_to_decodes = placement.yields_to_decodes
        self._tally = tally
        self._place_refill = place_refill
        self._sink: Callable[[AttemptEvent], None] = _ignore
        self._time_left = time_left
        self._refill: Refill | None = None
        self._session: DecodeSession | None = None
        self._supply: Supply | None = None  # by P
        self._has_first_tokens = False
        self._decoding: set[int] = set()  # outputs that D computes, whether or not the client still waits for them
        self._decoded: set[int] = set()  # outputs of which D has sent tokens
        self._told: set[int] = set()  # outputs that D was told to end before their end
        self._decode_is_done = False

    def open(self, sink: Callable[[AttemptEvent], None]) -> None:
        """Sends the request to the nodes, whose events go to `sink` from now on."""
        self._sink = sink
        timeout = self._time_left()
        self._tally.placed(self._node_request, num_uncached_tokens=(self._prefill or self._decode).num_uncached_tokens)
        if self._prefill is None or not self._node_request.ends_with_next_token:
            self._session = self._admit(timeout)
        if self._prefill is None:
            self._charge.begin()
            self._decoding = set(self._node_request.choices)
            return
        self._supply = self._supply_by(self._prefill, self._session)
        self._supply.open(self._wire_id, self._node_request, timeout=timeout, sink=sink)

    def _admit(self, timeout: float) -> DecodeSession:
        session = self._decode.client.open(self._wire_id, self._sink)
        self._decode.node.num_sequences += self._node_request.sampling.n  # from now on, `close` takes it back
        session.admit(
            self._node_request,
            epoch=self._decode.source.epoch,
            local_prefill=self._prefill is None,
            yields_to_decodes=self._yields_to_decodes,
            timeout=timeout,
            sources=self._decode.sources,
        )
        return session

    @property
    def awaited(self) -> str:
        """Returns which node the outputs wait for, and for what, as part of a sentence."""
        if self._prefill is not None and not self._has_first_tokens:
            return f"prefill node {self._prefill.source.node_id} to prefill"
        return f"decode node {self.decode_node} to {'go on' if self._decoded else 'begin'}"

    def finish(self, index: int) -> None:
        """Marks an output as one of which the client needs no more."""
        self.unfinished.discard(index)
        if index in self._decoded:
            self._decode.node.succeeded(self._decode.source)
            self._need_no_more(index)

    def close(self) -> None:
        """Ends the attempt at its nodes. Must be called however the attempt ends. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._sink = _ignore  # it refers to this attempt, and the prompt would stay until a collection of garbage
        self._charge.end()
        if self._session is not None:
            self._decode.node.num_sequences -= self._node_request.sampling.n
            self._session.close(finished=self._decode_is_done)
        if self._supply is not None:
            self._supply.close()
        if self._refill is not None:
            self._refill.close()

    # -- what happens --------------------------------------------------------------------------------------------------

    def take(self, event: AttemptEvent) -> Sequence[ClientEvent]:
        """Handles an event and returns what it means for the client. Raises NodeLostError if the attempt has failed,
        any other KVRelayError if the request has failed."""
        match event:
            case TokenOutput():
                return self._on_tokens(event)
            case PrefillAccepted() | Admitted():
                self._tally.accepted()
            case PrefillProgress(num_published_blocks):
                assert self._supply is not None
                self._supply.published(num_published_blocks)
            case PrefillFinished():
                return self._on_first_tokens(event)
            case PrefillEnded(error):
                self._on_prefill_ended(error)
            case PromptComputed(num_cached_tokens, fetches):
                self._tally.computed(
                    self._node_request, num_cached_tokens=num_cached_tokens, fetches=fetches, reader=NodeRole.DECODE
                )
            case KVMissing(num_missing_tokens):
                self._on_kv_missing(num_missing_tokens)
            case RefillEvent(refill_event):
                self._on_refill(refill_event)
            case KVReady():
                self._on_kv_ready(event)
            case PromptLogprobs():
                return (event,)
            case DecodeFailed(error):
                self._decode.node.failed(error, self._decode.source)
                if isinstance(error, UnavailableError):
                    loss = Loss.DECODING if self._has_first_tokens or self._prefill is None else Loss.WAITING
                    raise NodeLostError(self._decode, loss, error)
                raise error
        return ()

    def _on_tokens(self, output: TokenOutput) -> Sequence[ClientEvent]:
        self._decoded.add(output.index)
        if output.finish_reason is not None:
            self._decoding.discard(output.index)
            self._decode_is_done = not self._decoding
            self._decode.node.succeeded(self._decode.source)
        if output.index not in self.unfinished:
            self._need_no_more(output.index)
            return ()
        self._charge.end()
        self._tally.first_token()
        if output.finish_reason is not None:
            self.unfinished.discard(output.index)
        return (output,)

    def _need_no_more(self, index: int) -> None:
        """Tells D to end an output of which it has sent tokens, if the client waits for others."""
        if self.unfinished and index in self._decoding - self._told and self._session is not None:
            self._told.add(index)
            self._session.finish(index)

    def _on_first_tokens(self, finished: PrefillFinished) -> Sequence[ClientEvent]:
        assert self._prefill is not None and self._supply is not None
        if {output.index for output in finished.first_tokens} != set(self._node_request.choices):
            raise self._prefill_lost(KVRelayError("the prefill node did not answer with a token of every output"))
        decoding = {output.index for output in finished.first_tokens if output.finish_reason is None}
        if decoding and self._session is None:
            raise self._prefill_lost(KVRelayError("the prefill node did not end every output with its last token"))
        self._supply.computed()
        self._has_first_tokens = True
        self.prefill_node = self._prefill.source.node_id
        self._tally.first_token()
        self._tally.computed(
            self._node_request,
            num_cached_tokens=finished.num_cached_tokens,
            fetches=finished.fetches,
        )
        self._decoding = decoding
        self.unfinished &= decoding
        if decoding:
            assert self._session is not None
            self._session.start(finished.first_tokens)
        if self._node_request.sampling.prompt_logprobs is None:
            return finished.first_tokens
        return (finished.prompt_logprobs, *finished.first_tokens)

    def _on_prefill_ended(self, error: KVRelayError | None) -> None:
        assert self._supply is not None
        if not self._has_first_tokens:
            raise self._prefill_lost(error or KVRelayError("the prefill node ended without a first token"))
        if error is not None:
            _logger.warning("request %s: the prefill node failed after its first token: %s", self._wire_id, error)
        self._supply.ended(error)

    def _on_kv_missing(self, num_missing_tokens: int) -> None:
        """Answers D, which waits until it knows whether another node will provide the missing blocks."""
        assert self._session is not None
        if self._refill is not None and not self._refill.over:
            return  # the refill's announcements are the answer
        refill_request = blocks_only(self._node_request)
        placement = self._refill_placement(refill_request, num_missing_tokens)
        self._log_missing(num_missing_tokens, placement)
        if placement is None:
            self._session.pull_no_more()
            return
        self._tally.refill_began()
        supply = self._supply_by(placement, self._session)
        self._refill = Refill(refill_request, f"{self._wire_id}.refill", placement, supply, self._tally)
        self._refill.open(lambda event: self._sink(RefillEvent(event)), timeout=self._time_left())

    def _on_refill(self, event: PrefillEvent) -> None:
        if self._refill is None or self._refill.over:
            return
        self._refill.take(event)
        if isinstance(event, PrefillEnded) and isinstance(event.error, NotFiniteError):
            assert self._session is not None
            self._session.distrust()
            raise NodeLostError(self._refill.placement, Loss.PREFILLING, event.error)

    def _refill_placement(self, refill_request: NodeRequest, num_missing_tokens: int) -> PrefillPlacement | None:
        """Returns the attempt's only refill, or None if there was one already or no other node would help."""
        if self._refill is not None or self._prefill is None:
            return None
        placement = self._place_refill(
            refill_request, self._prefill.source, reader=self._decode.node, num_missing_tokens=num_missing_tokens
        )
        if placement is not None and self._prefill.source.is_store_only and placement.source.is_store_only:
            return None  # from the store D has just got nothing
        return placement

    def _log_missing(self, num_tokens: int, refill: PrefillPlacement | None) -> None:
        """Logs that KV does not get to D, once: while a store or a network fails, it is so for every request."""
        again_at = self.decode_node if refill is None else refill.source.node_id
        self._decode.node.outages.failed(
            self._outage,
            "request %s: the KV of %d tokens did not get to %s, and is computed again by %s",
            self._wire_id, num_tokens, self.decode_node, again_at,
        )  # fmt: skip

    def _on_kv_ready(self, ready: KVReady) -> None:
        self._tally.decode_ready(
            self._node_request,
            num_recomputed_tokens=ready.num_recomputed_tokens,
            fetches=ready.fetches,
            rungs=self._rungs(),
        )
        recomputes = ready.num_recomputed_tokens > 0
        lacked_blocks = self._refill is not None or recomputes  # of those that P should have sent
        if not lacked_blocks and ready.fetches.fetched:
            self._decode.node.outages.succeeded(self._outage)
        if self._supply is not None:
            self._supply.settle(ready.fetches, lacks_blocks=lacked_blocks)
        if self._refill is not None:
            self._refill.enough(ready.fetches, lacks_blocks=recomputes)
        if self._has_first_tokens:  # until then the prefill still needs its blocks
            assert self._supply is not None
            self._supply.release()

    def _prefill_lost(self, error: KVRelayError) -> KVRelayError:
        """Returns the error to raise because P has failed: `error` itself if no other node would do better."""
        assert self._prefill is not None
        self._prefill.node.failed(error, self._prefill.source)
        if isinstance(error, InvalidRequestError | DeadlineError):
            return error
        if isinstance(error, NotFiniteError) and self._session is not None:
            self._session.distrust()
        return NodeLostError(self._prefill, Loss.PREFILLING, error)

    def _supply_by(self, placement: PrefillPlacement, session: DecodeSession | None) -> Supply:
        if session is None:
            return Supply(placement, None, None)
        return Supply(placement, session, self._decode.node.links.begin(placement.source, self.decode_node))

    def _rungs(self) -> dict[str, Rung]:
        rungs: dict[str, Rung] = {}
        if self._refill is not None:
            rungs[self._refill.placement.source.node_id] = "refill"
        if self._prefill is not None:
            rungs[self._prefill.source.node_id] = "prefill_node"
        return rungs


def _ignore(event: AttemptEvent) -> None:
    """Does nothing: the sink of an attempt that is not open."""
