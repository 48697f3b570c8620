"""The supervisor of one request: it keeps the outputs so far, and makes the attempts that bring the rest. The life of a
request here:

1. All outputs are placed together. An `Attempt` (see attempt.py) serves them at the nodes that were chosen.
2. Tokens go to the client in the order in which they come. They are kept, because another node would need them.
3. If a node is lost (`NodeLostError`), its attempt is closed, and every output that is not finished is placed again on
   nodes that this request has not lost, with the prompt and all tokens that the client has. An output with tokens is
   placed alone, since it differs from the others from its first token on.
4. If no such decode node is live, the nodes that the request has lost are tried as well, after a wait that grows: a
   broken stream does not always mean that the node has ended.
5. If no decode node is live at all, the request waits for the next one, at most `node_wait` seconds from the loss, and
   then ends with UnavailableError.
6. An output that has lost more than `max_attempts` nodes in the same way (`Loss`) without getting past the point where
   it lost them may be what ends the nodes. While it is not known whether so many have ended, it is not placed again; a
   node that is live again has not, and one that has drained, or has not taken it (`NotTakenError`), does not count.
   When so many have, or that wait takes more than `node_wait`, the request ends with GivenUpError; when the router
   stops before it knows, with UnavailableError.
7. When every output has a finish reason or the client needs no more of it, the trace follows.

A token is a function of its logits, the seed, the output index and all tokens before it, never of the node that samples
it. So there is no gap and no repetition, and where logits have the same bits on all nodes (docs/cpu.md, The same bits),
the client gets the tokens it would have had without the loss.

Everything that happens, including the deadline and an abort, is put into one inbox as the call that handles it, and
handled in order. Invariant: the events end with exactly one of RequestTrace, a KVRelayError, or the consumer's close,
and then every attempt is closed. The clean-up does not wait, so no cancellation can interrupt it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from random import Random

from kvrelay.core.backoff import Backoff
from kvrelay.core.clock import Clock
from kvrelay.core.errors import CancelledByPeerError, DeadlineError, GivenUpError, KVRelayError, UnavailableError
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.source import KVSource
from kvrelay.core.turns import ITEMS_AT_A_TIME, OneAtATime
from router.nodes.node import NodeHandle
from router.relay.attempt import Attempt, AttemptEvent, ClientEvent
from router.relay.inbox import Inboxes
from router.relay.limits import RelayLimits
from router.relay.loss import NodeLostError
from router.relay.placer import Placer
from router.relay.prefill_client import PrefillFinished
from router.relay.resolved_placement import PrefillPlacement, ResolvedPlacement
from router.relay.share import Share
from router.relay.tally import Tally
from router.request import NodeRequest, RequestEvent, RoutedRequest

_logger = logging.getLogger(__name__)


Reaction = Callable[[], Sequence[RequestEvent]]
"""Handles something that happened: returns the events for the client, or raises the error that ends the request."""


class RequestSupervisor:
    """The supervisor of one request, which it serves by one call of `run`. `wire_id` is never used twice; the names of
    the request's attempts at the nodes begin with it. `replays`, which all requests share, gives each placement after a
    loss its turn: a lost node may have had hundreds of outputs. `random` spreads retries."""

    def __init__(
        self,
        request: RoutedRequest,
        wire_id: str,
        placer: Placer,
        tally: Tally,
        inboxes: "Inboxes[Reaction]",
        replays: OneAtATime,
        *,
        limits: RelayLimits,
        clock: Clock,
        random: Random,
    ) -> None:
        self._request = request
        self._wire_id = wire_id
        self._placer = placer
        self._tally = tally
        self._limits = limits
        self._router_stops = False
        self._clock = clock
        self._random = random
        self._began_at = clock.now()
        self._inbox = inboxes.open(self._on_too_slow)
        self._replays = replays
        self._tokens: dict[int, list[int]] = {index: [] for index in range(request.sampling.n)}
        self._unfinished = set(self._tokens)
        self._shares: list[Share] = []
        self._homeless: deque[Share] = deque()  # those to be placed again, before anything else is handled
        self._has_prompt_logprobs = False
        self._lost: set[KVSource] = set()
        self._num_attempts = 0  # of all shares together
        self._prefill_node: str | None = None  # the one that sampled the first token of any output
        self._decode_node = ""  # the one of the attempt that gave the latest token of any output
        self._deadline: asyncio.TimerHandle | None = None

    async def run(self) -> AsyncGenerator[RequestEvent, None]:
        """Serves the request as `Relay.run` describes."""
        try:
            self._open()
            num_taken = 0  # without waiting, of all that came while the client took nothing
            while self._unfinished:
                if num_taken == ITEMS_AT_A_TIME:
                    num_taken = 0
                    await asyncio.sleep(0)
                num_taken = 0 if self._inbox.empty() else num_taken + 1
                for event in (await self._inbox.get())():
                    yield event
                while self._homeless:
                    await self._replays.turn()
                    if self._homeless:  # an abort meanwhile leaves none
                        self._migrate(self._homeless.popleft())
            yield self._tally.trace(prefill_node=self._prefill_node, decode_node=self._decode_node)
        except (asyncio.CancelledError, GeneratorExit):
            if self._shares and self._request.is_over_after(self._clock.now() - self._began_at):
                self._log_deadline()  # the client's own, which is a little earlier than ours
            raise
        except KVRelayError as error:
            error.__traceback__ = None  # its frames refer to it and to this supervisor
            raise
        finally:
            self._close()
            self._inbox.close()  # what nobody has read refers to this supervisor, too

    def finish(self, index: int) -> None:
        """Marks an output as finished, as `Relay.finish` describes."""
        self._inbox.put_nowait(partial(self._on_satisfied, index))

    def on_decode_node_live(self) -> None:
        """Lets outputs that wait for a decode node look for one, because one has become live."""
        self._inbox.put_nowait(self._on_search)

    def wait_no_more(self) -> None:
        """Lets the request end, from now on, instead of waiting for a decode node, because the router stops."""
        self._router_stops = True
        self._inbox.put_nowait(self._on_search)

    def abort(self, error: KVRelayError | None = None) -> None:
        """Ends the request with an error, by default CancelledByPeerError. Its attempts are closed at once: while the
        client takes no events, the inbox is not read."""
        self._close()
        error = error or CancelledByPeerError(f"request {self._request.request_id} was aborted")
        self._inbox.put_nowait(partial(_end, error))

    # -- what happens --------------------------------------------------------------------------------------------------

    def _on_event(self, share: Share, attempt: Attempt, event: AttemptEvent) -> Sequence[RequestEvent]:
        if attempt.closed:
            return ()  # it was in the inbox already when the attempt was closed
        try:
            events = attempt.take(event)
        except NodeLostError as lost:
            self._on_lost(share, attempt, lost)
            return ()
        for output in events:
            self._remember(attempt, output)
            share.forgive_losses(are_first=isinstance(event, PrefillFinished))
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
                share.stop_waiting()
        return ()

    def _on_search(self) -> Sequence[RequestEvent]:
        """Places again all outputs that wait for a node."""
        for share in self._shares:
            self._on_retry(share)
        return ()

    def _on_retry(self, share: Share) -> Sequence[RequestEvent]:
        """Places a share again if it waits for a node."""
        if share.wait is not None:
            share.stop_waiting()
            self._homeless.append(share)
        return ()

    def _on_waited(self, share: Share) -> Sequence[RequestEvent]:
        """Ends the request if the share still has no node at the end of its wait."""
        if share.wait is None:
            return ()
        waited = self._clock.now() - share.lost_at
        error = UnavailableError(f"no decode node came that could go on within {waited:.1f} s: {share.lost}")
        _logger.warning("request %s: %s", self._wire_id, error)
        raise error from share.lost

    # -- placing and placing again -------------------------------------------------------------------------------------

    def _on_lost(self, share: Share, attempt: Attempt, lost: NodeLostError) -> None:
        _logger.warning("request %s: lost %s: %s", self._wire_id, lost.source.node_id, lost)
        lost.__traceback__ = None  # its frames refer to the attempt, and so to a prompt, for as long as it is kept
        attempt.close()
        self._lost.add(lost.source)
        if lost.was_taken:
            share.losses.add((lost.loss, lost.source))
        self._shares.remove(share)
        for choices in self._split(sorted(attempt.unfinished)):
            doubts_kv = share.doubts_kv or lost.doubts_kv
            again = Share(choices, copy(share.backoff), set(share.losses), lost, self._clock.now(), doubts_kv)
            self._shares.append(again)
            self._homeless.append(again)

    def _split(self, choices: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns which outputs are placed together: all of them while none has a token, otherwise each alone."""
        if len(choices) == self._request.sampling.n and not any(self._tokens.values()):
            return [tuple(choices)]
        return [(choice,) for choice in choices]

    def _migrate(self, share: Share) -> None:
        """Places a share again, or lets it wait for a node. Only a share that has waited takes a node that the request
        has lost before, and can be sure that the router has heard if its last one has ended or drained."""
        assert share.lost is not None
        share.forget_drained(self._placer.has_drained)
        away = self._away(share, share.lost)
        if len(away) > self._limits.max_attempts:
            self._wait_to_know(share, share.lost, away)
            return
        node_request = self._node_request(share.choices, is_replay=True)
        try:
            placement = self._placer.place(node_request, lost=self._lost, last_resort=share.has_waited)
        except UnavailableError as error:
            _logger.warning("request %s: no node to go on with: %s", self._wire_id, error)
            if share.has_waited:
                self._wait_for_node(share)
            else:
                self._search_later(share)
            return
        if share.doubts_kv:
            placement = placement.without_sources()
        node_id = placement.decode.source.node_id
        _logger.info("request %s: outputs %s go on at %s", self._wire_id, share.choices, node_id)
        self._tally.migrated(node_request, share.lost.loss.cause)
        self._start(share, node_request, placement)

    def _away(self, share: Share, lost: NodeLostError) -> list[KVSource]:
        """Returns the nodes that the share has lost in the same way as its last one (`lost`) and that may have ended.
        Unless the share has waited, the last one may have, because the router may not have heard of it yet."""
        nodes = [node for loss, node in share.losses if loss is lost.loss]
        last = None if share.has_waited else lost.source
        return [node for node in nodes if node == last or not self._placer.is_live(node)]

    def _wait_to_know(self, share: Share, lost: NodeLostError, away: Sequence[KVSource]) -> None:
        """Lets the share wait until it is known which of the nodes that are `away`, more than `max_attempts`, have
        ended. Raises GivenUpError if it is known that too many have, or if the share has waited for too long, and
        UnavailableError if the router stops before it knows."""
        have_ended = sum(map(self._placer.has_ended, away)) > self._limits.max_attempts
        if self._router_stops and not have_ended:
            raise UnavailableError("the router is stopping") from lost
        if have_ended or self._wait_left(share) <= 0.0:
            raise GivenUpError(f"given up after {len(away)} losses of a {lost.loss.value}: {lost}") from lost
        if not share.has_waited:
            _logger.warning("request %s: waits to know which of %d lost nodes have ended", self._wire_id, len(away))
        self._search_later(share)

    def _search_later(self, share: Share) -> None:
        """Lets the share look for a node after a wait that grows, or as soon as a decode node becomes live."""
        self._wait(share, share.backoff.next(), partial(self._on_retry, share))

    def _wait_for_node(self, share: Share) -> None:
        """Lets the share wait until a decode node becomes live, and ends the request if none does in time."""
        self._wait(share, max(0.0, self._wait_left(share)), partial(self._on_waited, share))

    def _wait(self, share: Share, seconds: float, react: Reaction) -> None:
        share.wait = asyncio.get_running_loop().call_later(seconds, self._inbox.put_nowait, react)

    def _wait_left(self, share: Share) -> float:
        """Returns for how many seconds the share may still wait for a decode node; 0 or less when it may not."""
        return 0.0 if self._router_stops else share.lost_at + self._limits.node_wait - self._clock.now()

    def _node_request(self, choices: tuple[int, ...], *, is_replay: bool) -> NodeRequest:
        tokens = self._tokens[choices[0]]
        sampling = self._request.sampling
        if is_replay:
            prompt_logprobs = None if self._has_prompt_logprobs else sampling.prompt_logprobs
            sampling = replace(sampling, n=len(choices), prompt_logprobs=prompt_logprobs)
        return NodeRequest(
            token_ids=self._request.prompt_token_ids + tuple(tokens),  # without tokens, no copy
            sampling=sampling,
            kv_namespace=self._request.kv_namespace,
            priority=self._request.priority,
            cache_salt=self._request.cache_salt,
            num_prior_output_tokens=len(tokens),
            first_choice_index=choices[0],
            is_replay=is_replay,
        )

    def _start(self, share: Share, node_request: NodeRequest, placement: ResolvedPlacement) -> None:
        suffix = f".{self._num_attempts}" if self._num_attempts else ""
        self._num_attempts += 1
        wire_id = f"{self._wire_id}{suffix}"
        attempt = share.attempt = Attempt(
            node_request, wire_id, placement, self._tally, place_refill=self._refill, time_left=self._time_left
        )
        nodes = [node.source.node_id for node in (placement.prefill, placement.decode) if node is not None]
        _logger.debug("request %s: placed at %s", wire_id, " and ".join(nodes))

        def sink(event: AttemptEvent) -> None:
            self._inbox.put_nowait(partial(self._on_event, share, attempt, event))

        attempt.open(sink)

    def _time_left(self) -> float:
        return max(0.0, self._began_at + self._request.timeout - self._clock.now())

    def _refill(
        self, node_request: NodeRequest, source: KVSource, *, reader: NodeHandle, num_missing_tokens: int
    ) -> PrefillPlacement | None:
        lost = self._lost | {source}
        return self._placer.refill(node_request, lost=lost, reader=reader, num_missing_tokens=num_missing_tokens)

    def _on_deadline(self) -> None:
        """Ends the request because its time is over."""
        self.abort(self._log_deadline())

    def _on_too_slow(self) -> None:
        """Ends the request because its client takes less than comes, and has left most of all that waits here."""
        error = CancelledByPeerError("the client takes its tokens too slowly: too many wait for it")
        _logger.warning("request %s: %s", self._wire_id, error)
        self.abort(error)

    def _log_deadline(self) -> DeadlineError:
        """Returns the error of a request whose time is over, and says in the log what it waited for."""
        unfinished = (share for share in self._shares if self._unfinished.intersection(share.choices))
        awaited = " and ".join(dict.fromkeys(share.awaited for share in unfinished))
        if not awaited or not self._inbox.empty():  # what the shares wait for may be in it
            awaited = "its client, or this router, to take what the nodes have sent"
        error = DeadlineError(
            f"the request took longer than {self._request.timeout:g} seconds; it waited for {awaited}"
        )
        _logger.info("request %s: %s", self._wire_id, error)
        return error

    # -- opening and closing -------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Places all outputs. Raises UnavailableError if no decode node is live: a new request does not wait for
        one."""
        share = Share(tuple(self._tokens), Backoff(random=self._random))
        node_request = self._node_request(share.choices, is_replay=False)
        placement = self._placer.place(node_request, lost=self._lost, last_resort=False)
        self._deadline = asyncio.get_running_loop().call_later(self._request.timeout, self._on_deadline)
        self._shares.append(share)
        self._start(share, node_request, placement)

    def _close(self) -> None:
        """Closes all attempts, however the request has ended. Neither waits nor fails."""
        if self._deadline is not None:
            self._deadline.cancel()
        for share in self._shares:
            share.stop_waiting()
            if share.attempt is not None:
                share.attempt.close()
        self._homeless.clear()
        self._shares.clear()  # they refer to this supervisor, and the prompt would stay until a collection of garbage


def _end(error: KVRelayError) -> Sequence[RequestEvent]:
    """Ends the request from outside: by its deadline or by an abort."""
    raise error
