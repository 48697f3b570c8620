"""The supervisor of one request: what its outputs are so far, and which attempts bring the rest. Life of a request
here:

1. The relay places all outputs together; an `Attempt` (see there) serves them from the nodes it chose.
2. Tokens go to the client in the order in which they come, and are remembered: they are what another node needs.
3. A node is lost (`NodeLostError`): its attempt is closed, and every output that is not finished is placed again on
   nodes that this request has not lost, with the prompt and all tokens the client has. An output with tokens is placed
   alone, since from its first token on it differs from the others.
4. No such node lives: after a wait, growing and jittered, those that it has lost are tried, too: not all that breaks
   is a node's end.
5. No decode node lives at all: the request waits for the next one that does, `node_wait` seconds from the loss.
6. An output is placed at most `max_attempts` times again without a new token. With that, or with the wait, the request
   ends with UnavailableError.
7. Every output has a finish reason, or the client has enough of it. The trace follows.

A token is a function of seed, output index and all tokens before it, never of where it is sampled: so the client sees
neither gap nor repeat, and the tokens it would have had.

Everything that happens, the deadline and an abort included, is put into one inbox as the call that deals with it, and
taken in order. Invariant: the events end with exactly one of RequestTrace, a KVRelayError, or the consumer's close;
after each of them every attempt is closed. The clean-up waits for nothing, so that no cancellation can interrupt it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Protocol

from kvrelay.core.backoff import Backoff
from kvrelay.core.block_hash import KVNamespace
from kvrelay.core.clock import Clock
from kvrelay.core.errors import CancelledByPeerError, DeadlineError, KVRelayError, UnavailableError
from kvrelay.core.kv_source import KVSource
from router.relay.attempt import Attempt, AttemptEvent, ClientEvent, NodeLostError
from router.relay.limits import RelayLimits
from router.relay.resolved_placement import PrefillPlacement, ResolvedPlacement
from router.relay.tally import Tally
from router.request import NodeRequest, PromptLogprobs, RequestEvent, RoutedRequest

_logger = logging.getLogger(__name__)


class Place(Protocol):
    """The relay's choice of nodes for some outputs of a request."""

    def place(self, node_request: NodeRequest, *, lost: AbstractSet[KVSource], last_resort: bool) -> ResolvedPlacement:
        """None of the `lost` nodes is chosen, unless as `last_resort` when no other decode node lives. Raises
        UnavailableError when there is no decode node; a prefill node is never missed."""
        ...

    def refill(
        self, node_request: NodeRequest, *, lost: AbstractSet[KVSource], num_missing_tokens: int
    ) -> PrefillPlacement | None:
        """A prefill node, none of the `lost` ones, for blocks of so many tokens that a decode node waits for in vain;
        None when it shall compute them."""
        ...


@dataclass(slots=True)
class _Share:
    """Outputs that are placed together. `num_attempts`: since their last token and beyond the first. `lost`: why they
    have to be placed again, if they have, and `lost_at` when. `wait` is the end of their wait for a node."""

    choices: tuple[int, ...]
    backoff: Backoff
    num_attempts: int = 0
    lost: NodeLostError | None = None
    lost_at: float = 0.0
    attempt: Attempt | None = None
    wait: asyncio.TimerHandle | None = None

    def has_new_tokens(self) -> None:
        """It has not been placed in vain."""
        self.num_attempts = 0
        self.backoff.reset()

    def wait_no_more(self) -> None:
        if self.wait is not None:
            self.wait.cancel()
            self.wait = None


_Reaction = Callable[[], Sequence[RequestEvent]]
"""To something that happened: gives what that means for the client, or raises the error that ends the request."""


class RequestSupervisor:
    """One request, one `run`. `wire_id` is the stem of its names at the nodes and is never used twice;
    times are read from `clock`; `random` spreads retries."""

    def __init__(
        self,
        request: RoutedRequest,
        wire_id: str,
        place: Place,
        tally: Tally,
        *,
        kv_namespace: KVNamespace,
        limits: RelayLimits,
        clock: Clock,
        random: Random,
    ) -> None:
        self._request = request
        self._wire_id = wire_id
        self._place = place
        self._tally = tally
        self._kv_namespace = kv_namespace
        self._max_attempts = limits.max_attempts
        self._node_wait = limits.node_wait
        self._clock = clock
        self._random = random
        self._expires_at = clock.now() + request.timeout
        self._inbox: asyncio.Queue[_Reaction] = asyncio.Queue()
        self._tokens: dict[int, list[int]] = {index: [] for index in range(request.sampling.n)}
        self._unfinished = set(self._tokens)
        self._shares: list[_Share] = []
        self._has_prompt_logprobs = False
        self._lost: set[KVSource] = set()
        self._num_attempts = 0  # of all shares
        self._prefill_node: str | None = None  # of the first tokens of all
        self._decode_node = ""  # of the last tokens of all
        self._deadline: asyncio.TimerHandle | None = None

    async def run(self) -> AsyncGenerator[RequestEvent, None]:
        """As `Relay.run`."""
        try:
            self._open()
            while self._unfinished:
                react = await self._inbox.get()
                for event in react():
                    yield event
            yield self._tally.trace(prefill_node=self._prefill_node, decode_node=self._decode_node)
        finally:
            self._close()

    def finish(self, index: int) -> None:
        """As `Relay.finish`."""
        self._inbox.put_nowait(partial(self._on_satisfied, index))

    def on_decode_node_live(self) -> None:
        """One has become live."""
        self._inbox.put_nowait(self._on_search)

    def wait_no_more(self) -> None:
        """The router stops: without a living decode node the request ends, now or when it comes to that."""
        self._node_wait = 0.0
        self._inbox.put_nowait(self._on_search)

    def abort(self, error: KVRelayError | None = None) -> None:
        """End the request with an error; by default that the client gave it up. The nodes are let go at once: a client
        that takes nothing does not let us come to what is in the inbox."""
        self._close()
        error = error or CancelledByPeerError(f"request {self._request.request_id} was aborted")
        self._inbox.put_nowait(partial(_end, error))

    # -- what happens --------------------------------------------------------------------------------------------------

    def _on_event(self, share: _Share, attempt: Attempt, event: AttemptEvent) -> Sequence[RequestEvent]:
        if attempt.closed:
            return ()  # was in the inbox already when the attempt was given up
        try:
            events = attempt.take(event)
        except NodeLostError as lost:
            self._on_lost(share, attempt, lost)
            return ()
        for output in events:
            self._remember(attempt, output)
            share.has_new_tokens()
        if not attempt.unfinished:
            attempt.close()
        return events

    def _remember(self, attempt: Attempt, event: ClientEvent) -> None:
        if isinstance(event, PromptLogprobs):
            self._has_prompt_logprobs = True
            return
        if not any(self._tokens.values()):
            self._prefill_node = attempt.prefill_node
        self._decode_node = attempt.decode_node
        self._tokens[event.index].extend(event.token_ids)
        if event.finish_reason is not None:
            self._unfinished.discard(event.index)

    def _on_satisfied(self, index: int) -> Sequence[RequestEvent]:
        self._unfinished.discard(index)
        for share in self._shares:
            if share.attempt is not None and index in share.choices:
                share.attempt.finish(index)
                if not share.attempt.unfinished:
                    share.attempt.close()
            if not self._unfinished.intersection(share.choices):
                share.wait_no_more()
        return ()

    def _on_search(self) -> Sequence[RequestEvent]:
        """Those that wait for a node may find one now."""
        for share in self._shares:
            if share.wait is not None:
                self._migrate(share, last_resort=True)
        return ()

    def _on_waited(self, share: _Share) -> Sequence[RequestEvent]:
        """The share has waited long enough, unless it has a node by now."""
        if share.wait is None:
            return ()
        waited = self._clock.now() - share.lost_at
        raise UnavailableError(f"no decode node came within {waited:.1f} s: {share.lost}") from share.lost

    # -- placing and placing again -------------------------------------------------------------------------------------

    def _on_lost(self, share: _Share, attempt: Attempt, lost: NodeLostError) -> None:
        _logger.warning("request %s: lost %s: %s", self._wire_id, lost.source.node_id, lost)
        attempt.close()
        self._lost.add(lost.source)
        self._shares.remove(share)
        for choices in self._split(sorted(attempt.unfinished)):
            again = _Share(choices, copy(share.backoff), share.num_attempts, lost, self._clock.now())
            self._shares.append(again)
            self._migrate(again, last_resort=False)

    def _split(self, choices: Sequence[int]) -> list[tuple[int, ...]]:
        """What can be placed together: all outputs while none has a token, otherwise each by itself."""
        if len(choices) == self._request.sampling.n and not any(self._tokens.values()):
            return [tuple(choices)]
        return [(choice,) for choice in choices]

    def _migrate(self, share: _Share, *, last_resort: bool) -> None:
        """Places a share again, or lets it wait for a node. Raises UnavailableError when it was tried often enough."""
        lost = share.lost
        assert lost is not None
        share.wait_no_more()
        if share.num_attempts >= self._max_attempts:
            raise UnavailableError(f"given up after {share.num_attempts} more placements: {lost}") from lost
        node_request = self._node_request(share.choices, is_replay=True)
        try:
            placement = self._place.place(node_request, lost=self._lost, last_resort=last_resort)
        except UnavailableError as error:
            _logger.warning("request %s: no node to go on with: %s", self._wire_id, error)
            share.wait = self._wait(share, none_lives=last_resort)
            return
        _logger.info(
            "request %s: outputs %s go on at %s", self._wire_id, share.choices, placement.decode.source.node_id
        )
        share.num_attempts += 1
        self._tally.migrated(node_request, lost.cause.value)
        self._start(share, node_request, placement)

    def _wait(self, share: _Share, *, none_lives: bool) -> asyncio.TimerHandle:
        """When a wait for a decode node ends, unless `on_decode_node_live` does it before."""
        react: _Reaction
        if none_lives:
            seconds, react = share.lost_at + self._node_wait - self._clock.now(), partial(self._on_waited, share)
        else:
            seconds, react = share.backoff.next(), self._on_search
        return asyncio.get_running_loop().call_later(max(0.0, seconds), self._inbox.put_nowait, react)

    def _node_request(self, choices: tuple[int, ...], *, is_replay: bool) -> NodeRequest:
        tokens = self._tokens[choices[0]]
        sampling = replace(self._request.sampling, n=len(choices))
        if self._has_prompt_logprobs:
            sampling = replace(sampling, prompt_logprobs=None)
        return NodeRequest(
            token_ids=(*self._request.prompt_token_ids, *tokens),
            sampling=sampling,
            kv_namespace=self._kv_namespace,
            priority=self._request.priority,
            cache_salt=self._request.cache_salt,
            num_prior_output_tokens=len(tokens),
            first_choice_index=choices[0],
            is_replay=is_replay,
        )

    def _start(self, share: _Share, node_request: NodeRequest, placement: ResolvedPlacement) -> None:
        suffix = f".{self._num_attempts}" if self._num_attempts else ""
        self._num_attempts += 1
        attempt = share.attempt = Attempt(
            node_request, f"{self._wire_id}{suffix}", placement, self._tally, place_refill=self._refill
        )

        def sink(event: AttemptEvent) -> None:
            self._inbox.put_nowait(partial(self._on_event, share, attempt, event))

        attempt.open(sink, timeout=max(0.0, self._expires_at - self._clock.now()))

    def _refill(
        self, node_request: NodeRequest, source: KVSource, *, num_missing_tokens: int
    ) -> PrefillPlacement | None:
        return self._place.refill(node_request, lost=self._lost | {source}, num_missing_tokens=num_missing_tokens)

    # -- opening and closing -------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Raises UnavailableError when no node lives: a request that has not begun does not wait for one."""
        timeout = self._request.timeout
        share = _Share(tuple(self._tokens), Backoff(random=self._random))
        node_request = self._node_request(share.choices, is_replay=False)
        placement = self._place.place(node_request, lost=self._lost, last_resort=False)
        error = DeadlineError(f"the request took longer than {timeout:g} seconds")
        self._deadline = asyncio.get_running_loop().call_later(timeout, self.abort, error)
        self._shares.append(share)
        self._start(share, node_request, placement)

    def _close(self) -> None:
        """In every ending. Nothing here waits or fails."""
        if self._deadline is not None:
            self._deadline.cancel()
        for share in self._shares:
            share.wait_no_more()
            if share.attempt is not None:
                share.attempt.close()


def _end(error: KVRelayError) -> Sequence[RequestEvent]:
    """Deadline or abort: the request is over from outside."""
    raise error
