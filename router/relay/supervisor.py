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
6. An output that has lost more than `max_node_losses` nodes in the same way (`Loss`) without getting past the point
   where it lost them may be what ends the nodes. While it is not known whether so many have ended, it is not placed
   again; a node that is live again has not, and one that has drained, or has not taken it (`NotTakenError`), does not
   count. When so many have, or that wait takes more than `node_wait`, the request ends with GivenUpError; when the
   router stops before it knows, with UnavailableError.
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
from router.nodes.registry import Registry
from router.relay.attempt import Attempt, AttemptEvent, ClientEvent
from router.relay.inbox import Inboxes
from router.relay.limits import RelayLimits
from router.relay.loss import NodeLostError
from router.relay.output_group import OutputGroup
from router.relay.placer import Placer
from router.relay.prefill_client import PrefillFinished
from router.relay.resolved_placement import PrefillPlacement, ResolvedPlacement
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
        registry: Registry,
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
        self._registry = registry
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
        self._groups: list[OutputGroup] = []
        self._to_place: deque[OutputGroup] = deque()  # those to be placed again, before anything else is handled
        self._has_prompt_logprobs = False
        self._lost: set[KVSource] = set()
        self._num_attempts = 0  # of all groups together
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
                while self._to_place:
                    await self._replays.turn()
                    if self._to_place:  # an abort meanwhile leaves none
                        self._migrate(self._to_place.popleft())
            yield self._tally.trace(prefill_node=self._prefill_node, decode_node=self._decode_node)
        except (asyncio.CancelledError, GeneratorExit):
            if self._groups and self._request.is_over_after(self._clock.now() - self._began_at):
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

    def _on_event(self, group: OutputGroup, attempt: Attempt, event: AttemptEvent) -> Sequence[RequestEvent]:
        if attempt.closed:
            return ()  # it was in the inbox already when the attempt was closed
        try:
            events = attempt.take(event)
        except NodeLostError as lost:
            self._on_lost(group, attempt, lost)
            return ()
        for output in events:
            self._remember(attempt, output)
            group.forgive_losses(are_first=isinstance(event, PrefillFinished))
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
        for group in self._groups:
            if group.attempt is not None and index in group.choices:
                group.attempt.finish(index)
                if not group.attempt.unfinished:
                    group.attempt.close()
            if not self._unfinished.intersection(group.choices):
                group.stop_waiting()
        return ()

    def _on_search(self) -> Sequence[RequestEvent]:
        """Places again all outputs that wait for a node."""
        for group in self._groups:
            self._on_retry(group)
        return ()

    def _on_retry(self, group: OutputGroup) -> Sequence[RequestEvent]:
        """Places a group again if it waits for a node."""
        if group.wait is not None:
            group.stop_waiting()
            self._to_place.append(group)
        return ()

    def _on_waited(self, group: OutputGroup) -> Sequence[RequestEvent]:
        """Ends the request if the group still has no node at the end of its wait."""
        if group.wait is None:
            return ()
        waited = self._clock.now() - group.lost_at
        error = UnavailableError(f"no decode node came that could go on within {waited:.1f} s: {group.lost}")
        _logger.warning("request %s: %s", self._wire_id, error)
        raise error from group.lost

    # -- placing and placing again -------------------------------------------------------------------------------------

    def _on_lost(self, group: OutputGroup, attempt: Attempt, lost: NodeLostError) -> None:
        _logger.warning("request %s: lost %s: %s", self._wire_id, lost.source.node_id, lost)
        lost.__traceback__ = None  # its frames refer to the attempt, and so to a prompt, for as long as it is kept
        attempt.close()
        self._lost.add(lost.source)
        if lost.was_taken:
            group.losses.add((lost.loss, lost.source))
        self._groups.remove(group)
        for choices in self._split(sorted(attempt.unfinished)):
            doubts_kv = group.doubts_kv or lost.doubts_kv
            again = OutputGroup(choices, copy(group.backoff), set(group.losses), lost, self._clock.now(), doubts_kv)
            self._groups.append(again)
            self._to_place.append(again)

    def _split(self, choices: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns which outputs are placed together: all of them while none has a token, otherwise each alone."""
        if len(choices) == self._request.sampling.n and not any(self._tokens.values()):
            return [tuple(choices)]
        return [(choice,) for choice in choices]

    def _migrate(self, group: OutputGroup) -> None:
        """Places a group again, or lets it wait for a node. Only a group that has waited takes a node that the request
        has lost before, and can be sure that the router has heard if its last one has ended or drained."""
        assert group.lost is not None
        group.forget_drained(self._registry.has_drained)
        away = self._away(group, group.lost)
        if len(away) > self._limits.max_node_losses:
            self._wait_to_know(group, group.lost, away)
            return
        node_request = self._node_request(group.choices, is_replay=True)
        try:
            placement = self._placer.place(node_request, lost=self._lost, last_resort=group.has_waited)
        except UnavailableError as error:
            _logger.warning("request %s: no node to go on with: %s", self._wire_id, error)
            if group.has_waited:
                self._wait_for_node(group)
            else:
                self._search_later(group)
            return
        if group.doubts_kv:
            placement = placement.without_sources()
        node_id = placement.decode.source.node_id
        _logger.info("request %s: outputs %s go on at %s", self._wire_id, group.choices, node_id)
        self._tally.migrated(node_request, group.lost.loss.cause)
        self._start(group, node_request, placement)

    def _away(self, group: OutputGroup, lost: NodeLostError) -> list[KVSource]:
        """Returns the nodes that the group has lost in the same way as its last one (`lost`) and that may have ended.
        Unless the group has waited, the last one may have, because the router may not have heard of it yet."""
        nodes = [node for loss, node in group.losses if loss is lost.loss]
        last = None if group.has_waited else lost.source
        return [node for node in nodes if node == last or not self._registry.is_live(node)]

    def _wait_to_know(self, group: OutputGroup, lost: NodeLostError, away: Sequence[KVSource]) -> None:
        """Lets the group wait until it is known which of the nodes that are `away`, more than `max_node_losses`, have
        ended. Raises GivenUpError if it is known that too many have, or if the group has waited for too long, and
        UnavailableError if the router stops before it knows."""
        have_ended = sum(map(self._registry.has_ended, away)) > self._limits.max_node_losses
        if self._router_stops and not have_ended:
            raise UnavailableError("the router is stopping") from lost
        if have_ended or self._wait_left(group) <= 0.0:
            raise GivenUpError(f"given up after {len(away)} losses of a {lost.loss.value}: {lost}") from lost
        if not group.has_waited:
            _logger.warning("request %s: waits to know which of %d lost nodes have ended", self._wire_id, len(away))
        self._search_later(group)

    def _search_later(self, group: OutputGroup) -> None:
        """Lets the group look for a node after a wait that grows, or as soon as a decode node becomes live."""
        self._wait(group, group.backoff.next(), partial(self._on_retry, group))

    def _wait_for_node(self, group: OutputGroup) -> None:
        """Lets the group wait until a decode node becomes live, and ends the request if none does in time."""
        self._wait(group, max(0.0, self._wait_left(group)), partial(self._on_waited, group))

    def _wait(self, group: OutputGroup, seconds: float, react: Reaction) -> None:
        group.wait = asyncio.get_running_loop().call_later(seconds, self._inbox.put_nowait, react)

    def _wait_left(self, group: OutputGroup) -> float:
        """Returns for how many seconds the group may still wait for a decode node; 0 or less when it may not."""
        return 0.0 if self._router_stops else group.lost_at + self._limits.node_wait - self._clock.now()

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

    def _start(self, group: OutputGroup, node_request: NodeRequest, placement: ResolvedPlacement) -> None:
        suffix = f".{self._num_attempts}" if self._num_attempts else ""
        self._num_attempts += 1
        wire_id = f"{self._wire_id}{suffix}"
        attempt = group.attempt = Attempt(
            node_request, wire_id, placement, self._tally, place_refill=self._refill, time_left=self._time_left
        )
        nodes = [node.source.node_id for node in (placement.prefill, placement.decode) if node is not None]
        _logger.debug("request %s: placed at %s", wire_id, " and ".join(nodes))

        def sink(event: AttemptEvent) -> None:
            self._inbox.put_nowait(partial(self._on_event, group, attempt, event))

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
        unfinished = (group for group in self._groups if self._unfinished.intersection(group.choices))
        awaited = " and ".join(dict.fromkeys(group.awaited for group in unfinished))
        if not awaited or not self._inbox.empty():  # what the groups wait for may be in it
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
        group = OutputGroup(tuple(self._tokens), Backoff(random=self._random))
        node_request = self._node_request(group.choices, is_replay=False)
        placement = self._placer.place(node_request, lost=self._lost, last_resort=False)
        self._deadline = asyncio.get_running_loop().call_later(self._request.timeout, self._on_deadline)
        self._groups.append(group)
        self._start(group, node_request, placement)

    def _close(self) -> None:
        """Closes all attempts, however the request has ended. Neither waits nor fails."""
        if self._deadline is not None:
            self._deadline.cancel()
        for group in self._groups:
            group.stop_waiting()
            if group.attempt is not None:
                group.attempt.close()
        self._to_place.clear()
        self._groups.clear()  # they refer to this supervisor, and the prompt would stay until a collection of garbage


def _end(error: KVRelayError) -> Sequence[RequestEvent]:
    """Ends the request from outside: by its deadline or by an abort."""
    raise error
