"""Prefill and decode nodes in virtual time: they compute nothing, and take as long as `NodeCosts` says.

Left out are preemption (a sequence takes the room of its whole answer when it begins), what a prefill node publishes
before it has computed a whole prompt, lent cores, and everything that fails.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bench.placement.pool import Pool
from kvrelay.core.kv.block_hash import BlockHash
from router.nodes.coming_prompts import Beginnings, ComingPrompts


class EventQueue:
    """Calls that are due at virtual times, in seconds. Those of the same time are made in the order in which they were
    added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now + max(0.0, seconds), next(self._numbers), call))

    def run(self) -> None:
        """Makes all calls, those that they add included."""
        while self._calls:
            self.now, _, call = heapq.heappop(self._calls)
            call()


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """What work takes, in seconds: a step, and in addition each sequence that decodes in it and each token of a prompt;
    and to fetch the KV of one token."""

    step: float
    sequence: float
    prompt_token: float
    moved_token: float


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """A pool has `num_blocks` blocks of `block_size` tokens. A step computes at most `max_num_batched_tokens` tokens of
    prompts, beside decodes `tokens_beside_decodes`."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tokens_beside_decodes: int


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way. `prompt_blocks` and `all_blocks` are the names of its full blocks, the latter with those of
    its answer. Times are in seconds."""

    num_prompt_tokens: int
    num_output_tokens: int
    prompt_blocks: Sequence[BlockHash]
    all_blocks: Sequence[BlockHash]
    beginnings: Beginnings
    arrived: float
    num_charged_tokens: int = 0  # of the prompt: what the router thinks that the node that prefills has to compute
    num_claimed_blocks: int = 0  # what it thinks that the decode node has to find room for
    num_held_tokens: int = 0  # of the prompt, by the node that prefills
    num_fetched_tokens: int = 0  # by that one from others
    num_left_tokens: int = 0  # of the prompt, for the decode node to compute
    has_begun: bool = False  # to be computed there
    num_made_tokens: int = 0
    began_prefill: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    decode_node: str = ""

    @property
    def num_computed_tokens(self) -> int:
        """Counts the tokens of the prompt that are neither held nor fetched: at least one, for the logits."""
        return max(1, self.num_prompt_tokens - self.num_held_tokens - self.num_fetched_tokens)

    def find(self, pool: Pool, sources: Sequence[Pool], block_size: int) -> None:
        """Notes how much of the prompt the node of `pool` holds, and how much more it can fetch from the best of the
        `sources`."""
        held = pool.num_leading(self.prompt_blocks)
        found = max([held, *(source.num_leading(self.prompt_blocks) for source in sources)])
        self.num_held_tokens = held * block_size
        self.num_fetched_tokens = (found - held) * block_size

    def made_token(self, now: float) -> None:
        if not self.num_made_tokens:
            self.first_token = now
        self.last_token = now
        self.num_made_tokens += 1


OnEnd: TypeAlias = Callable[[Request], None]


class PrefillNode:
    """A node that computes prompts, one after the other, and calls `on_end` with each that is computed."""

    def __init__(self, pool: Pool, events: EventQueue, costs: NodeCosts, limits: NodeLimits, on_end: OnEnd) -> None:
        self.pool = pool
        self.coming = ComingPrompts()
        self._events = events
        self._costs = costs
        self._limits = limits
        self._on_end = on_end
        self._queue: deque[tuple[Request, Sequence[Pool]]] = deque()  # the first one is being computed

    @property
    def num_queued_tokens(self) -> int:
        """Counts as the router does: until a prompt is computed, all that the node has to compute of it."""
        return sum(request.num_charged_tokens for request, _ in self._queue)

    def add(self, request: Request, sources: Sequence[Pool]) -> None:
        """Computes the prompt, with what the `sources` hold, and its first token."""
        self._queue.append((request, sources))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        request, sources = self._queue[0]
        request.began_prefill = self._events.now
        request.find(self.pool, sources, self._limits.block_size)
        self.pool.use(request.prompt_blocks)
        num_steps = -(-request.num_computed_tokens // self._limits.max_num_batched_tokens)
        seconds = (
            request.num_fetched_tokens * self._costs.moved_token
            + request.num_computed_tokens * self._costs.prompt_token
            + num_steps * self._costs.step
        )
        self._events.after(seconds, self._end)

    def _end(self) -> None:
        request, _ = self._queue.popleft()
        self.coming.end(request.beginnings)
        self.pool.store(request.prompt_blocks)
        self.pool.leave(request.prompt_blocks)
        request.made_token(self._events.now)
        self._on_end(request)
        if self._queue:
            self._begin()


class DecodeNode:
    """A node that makes one token of each of its sequences in every step, computes prompts beside them, and calls
    `on_end` with each request that has all its tokens."""

    def __init__(self, pool: Pool, events: EventQueue, costs: NodeCosts, limits: NodeLimits, on_end: OnEnd) -> None:
        self.pool = pool
        self.coming = ComingPrompts()
        self._events = events
        self._costs = costs
        self._limits = limits
        self._on_end = on_end
        self._expected: set[Request] = set()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._is_computing = False

    @property
    def num_sequences(self) -> int:
        return len(self._expected) + len(self._waiting) + len(self._running)

    @property
    def num_decoding(self) -> int:
        return sum(1 for request in self._running if not request.num_left_tokens)

    @property
    def num_queued_tokens(self) -> int:
        """Counts as the router does: until a prompt is computed, all that this node has to compute of it."""
        requests = itertools.chain(self._expected, self._waiting, self._running)
        return sum(request.num_charged_tokens for request in requests if request.num_left_tokens)

    @property
    def num_free_blocks(self) -> int:
        """Counts those that are free and that no request is to take that has been placed here."""
        placed = itertools.chain(self._expected, self._waiting)
        return max(0, self.pool.num_free - sum(request.num_claimed_blocks for request in placed))

    def expect(self, request: Request) -> None:
        """Notes that a request has been placed here. `add` or `cancel` follows."""
        self._expected.add(request)

    def cancel(self, request: Request) -> None:
        """Forgets a request that was expected."""
        self._expected.remove(request)

    def add(self, request: Request) -> None:
        """Runs a request that was expected, of whose prompt all but `num_left_tokens` tokens have come."""
        self._expected.remove(request)
        self._waiting.append(request)
        self._begin_step()

    def _begin_step(self) -> None:
        if self._is_computing:
            return
        self._admit()
        if not self._running:
            return
        self._is_computing = True
        num_decoding = self.num_decoding
        room = self._limits.tokens_beside_decodes if num_decoding else self._limits.max_num_batched_tokens
        num_tokens = 0
        for request in self._running:
            if num_tokens == room:
                break
            if request.num_left_tokens and not request.has_begun:
                request.has_begun = True
                self._find_more(request)
            share = min(request.num_left_tokens, room - num_tokens)
            request.num_left_tokens -= share
            num_tokens += share
        costs = self._costs
        self._events.after(costs.step + num_decoding * costs.sequence + num_tokens * costs.prompt_token, self._end_step)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting[0]
            if self.pool.num_taken(request.all_blocks) > self.pool.num_free:
                break
            self._running.append(self._waiting.popleft())
            self.pool.use(request.all_blocks)
            if not request.num_left_tokens:
                self.pool.store(request.prompt_blocks)

    def _find_more(self, request: Request) -> None:
        """Notes what other requests have computed of a prompt since it was placed."""
        held = self.pool.num_leading(request.prompt_blocks) * self._limits.block_size
        if held > request.num_held_tokens + request.num_fetched_tokens:
            request.num_held_tokens, request.num_fetched_tokens = held, 0
            request.num_left_tokens = request.num_computed_tokens

    def _end_step(self) -> None:
        self._is_computing = False
        for request in self._running:
            if request.has_begun and not request.num_made_tokens:
                num_tokens = request.num_prompt_tokens - request.num_left_tokens
                self.pool.store(request.prompt_blocks[: num_tokens // self._limits.block_size])
        making = [request for request in self._running if not request.num_left_tokens]
        for request in making:
            if not request.num_made_tokens:
                self.coming.end(request.beginnings)
            request.made_token(self._events.now)
            if request.num_made_tokens == request.num_output_tokens:
                self._running.remove(request)
                self.pool.store(request.all_blocks)
                self.pool.leave(request.all_blocks)
                self._on_end(request)
        self._begin_step()
