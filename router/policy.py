"""Which nodes serve a request: pure functions from frozen facts to a placement.

Nothing in here reads a clock, a socket or a random number, so that a decision can be repeated from its facts.
Invariant: the nodes of a placement are among the candidates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

MAX_SOURCES = 4


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """`number` counts this router's requests. `num_outputs` is the request's n."""

    number: int
    num_prompt_tokens: int
    num_outputs: int
    block_size: int

    def uncached_tokens(self, num_held_blocks: int) -> int:
        """Prompt tokens to compute where this many leading blocks are held: at least one, for its logits."""
        return max(1, self.num_prompt_tokens - num_held_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """`num_held_blocks`: leading blocks of this prompt it holds, as far as is known. `num_queued_tokens`: not computed
    yet."""

    node_id: str
    num_held_blocks: int
    num_queued_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """As PrefillCandidate; `num_sequences` run or wait there, `num_decoding` of them have their first token;
    `num_free_blocks` are free or evictable."""

    node_id: str
    num_held_blocks: int
    num_queued_tokens: int
    num_sequences: int
    num_free_blocks: int
    num_decoding: int = 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """Live nodes, in a stable order; `decode` is not empty."""

    prefill: tuple[PrefillCandidate, ...]
    decode: tuple[DecodeCandidate, ...]

    @property
    def all(self) -> tuple[PrefillCandidate | DecodeCandidate, ...]:
        return (*self.prefill, *self.decode)


@dataclass(frozen=True, slots=True)
class SourceHint:
    """This node holds the prompt's first `num_blocks` blocks."""

    node_id: str
    num_blocks: int


class PlacementReason(Enum):
    DISAGGREGATED = "disaggregated"
    NO_PREFILL_NODE = "no_prefill_node"
    SHORT_SUFFIX = "short_suffix"  # cheaper to compute where it is decoded than to move it
    PREFILL_BUSY = "prefill_busy"  # the queue there is longer than the delay that computing it here would cause


@dataclass(frozen=True, slots=True)
class Placement:
    """The node ids that a policy chose. With `prefill` None the decode node computes the prompt.

    `sources`: nodes that hold more of the prompt than `prefill` does, best first; it may fetch from them.
    `decode_sources`: nodes other than `prefill` that hold more of the prompt than `decode` does, best first."""

    prefill: str | None
    decode: str
    reason: PlacementReason
    sources: tuple[SourceHint, ...] = ()
    decode_sources: tuple[SourceHint, ...] = ()


@dataclass(frozen=True, slots=True)
class RefillPlacement:
    """A second prefill node for blocks that did not arrive from the first, and the nodes it may fetch from."""

    prefill: str
    sources: tuple[SourceHint, ...]


_NodeT = TypeVar("_NodeT", PrefillCandidate, DecodeCandidate)


class Policy(Protocol):
    def choose(self, facts: RequestFacts, candidates: Candidates) -> Placement:
        """Same arguments, same placement. Cheap: called once per request on the router's loop."""
        ...

    def refill(self, facts: RequestFacts, candidates: Candidates, num_missing_tokens: int) -> RefillPlacement | None:
        """A prefill node among the candidates, for blocks of so many tokens that a decode node was to fetch and nobody
        has; None when it shall compute them by itself."""
        ...


class RoundRobin:
    """Every node in turn."""

    def choose(self, facts: RequestFacts, candidates: Candidates) -> Placement:
        decode = candidates.decode[facts.number % len(candidates.decode)]
        if not candidates.prefill:
            return _local(facts, decode, PlacementReason.NO_PREFILL_NODE, candidates)
        prefill = candidates.prefill[facts.number % len(candidates.prefill)]
        return _disaggregated(facts, prefill, decode, candidates)

    def refill(self, facts: RequestFacts, candidates: Candidates, num_missing_tokens: int) -> RefillPlacement | None:
        if not candidates.prefill:
            return None
        return _refill(facts, candidates.prefill[facts.number % len(candidates.prefill)], candidates)


class LeastLoaded:
    """The prefill node with the fewest queued tokens, the decode node with the fewest sequences; blind to what they
    hold."""

    def choose(self, facts: RequestFacts, candidates: Candidates) -> Placement:
        decode = min(candidates.decode, key=lambda node: (node.num_sequences, -node.num_free_blocks))
        if not candidates.prefill:
            return _local(facts, decode, PlacementReason.NO_PREFILL_NODE, candidates)
        prefill = min(candidates.prefill, key=lambda node: node.num_queued_tokens)
        return _disaggregated(facts, prefill, decode, candidates)

    def refill(self, facts: RequestFacts, candidates: Candidates, num_missing_tokens: int) -> RefillPlacement | None:
        if not candidates.prefill:
            return None
        return _refill(facts, min(candidates.prefill, key=lambda node: node.num_queued_tokens), candidates)


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Everything in units of computing one prompt token."""

    moved_token: float = 0.1  # fetch one token's KV from another node
    sequence: float = 16.0  # one more output in a decode node's running batch
    missing_token: float = 8.0  # one token for which a decode node has no free slot now: the request waits or preempts


class PrefixAware:
    """The cheapest nodes, by what they hold and how busy they are.

    Costs are counted in computed prompt tokens. With h leading tokens held by a node and H the most held by any node:

        prefill node = (prompt - max(h, H)) + moved_token * max(0, H - h) + queued tokens
        decode node  = moved_token * (prompt - h) + queued tokens + sequence * (its sequences + n)
                       + missing_token * max(0, prompt - h + n * block_size - free tokens)

    The two legs are independent, so each takes its own minimum; ties go to the node that holds more, then in turn.

    The decode node prefills by itself (conditional disaggregation) when no prefill node lives; what others hold of the
    prompt it fetches, and the rest costs every node the same. Also when it misses at most `local_prefill_max_tokens`:
    moving would cost a round trip and save one small chunk. And when the prefill node's queue is longer than the delay
    that a prefill beside decodes inflicts, which is its own length for each sequence that decodes there:

        (tokens it misses) * (1 + sequences that decode there) + its queued tokens  <  cost of the prefill node

    so an idle decode node helps with a burst, and a busy one is left alone. `local_prefill_max_tokens` 0 switches the
    last two off. (Cf. DistServe, OSDI 2024, on interference; Mooncake, FAST 2025, on cache-aware prefill scheduling.)
    """

    def __init__(self, local_prefill_max_tokens: int = 64, weights: CostWeights | None = None) -> None:
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._weights = weights or CostWeights()

    def choose(self, facts: RequestFacts, candidates: Candidates) -> Placement:
        decode = _cheapest(facts, candidates.decode, [self._decode_cost(facts, node) for node in candidates.decode])
        if not candidates.prefill:
            return _local(facts, decode, PlacementReason.NO_PREFILL_NODE, candidates)
        uncached = facts.uncached_tokens(decode.num_held_blocks)
        if uncached <= self._local_prefill_max_tokens:
            return _local(facts, decode, PlacementReason.SHORT_SUFFIX, candidates)
        most_held = max(node.num_held_blocks for node in candidates.all)
        costs = [self._prefill_cost(facts, node, most_held) for node in candidates.prefill]
        local_cost = uncached * (1 + decode.num_decoding) + decode.num_queued_tokens
        if self._local_prefill_max_tokens > 0 and local_cost < min(costs):
            return _local(facts, decode, PlacementReason.PREFILL_BUSY, candidates)
        prefill = _cheapest(facts, candidates.prefill, costs)
        return _disaggregated(facts, prefill, decode, candidates)

    def refill(self, facts: RequestFacts, candidates: Candidates, num_missing_tokens: int) -> RefillPlacement | None:
        """The cheapest prefill node, unless so few tokens are missing that they would be computed by the decode node in
        the first place."""
        if not candidates.prefill or num_missing_tokens <= self._local_prefill_max_tokens:
            return None
        most_held = max(node.num_held_blocks for node in candidates.all)
        costs = [self._prefill_cost(facts, node, most_held) for node in candidates.prefill]
        return _refill(facts, _cheapest(facts, candidates.prefill, costs), candidates)

    def _prefill_cost(self, facts: RequestFacts, node: PrefillCandidate, most_held: int) -> float:
        moved = (most_held - node.num_held_blocks) * facts.block_size
        return facts.uncached_tokens(most_held) + self._weights.moved_token * moved + node.num_queued_tokens

    def _decode_cost(self, facts: RequestFacts, node: DecodeCandidate) -> float:
        absent = max(0, facts.num_prompt_tokens - node.num_held_blocks * facts.block_size)
        room = node.num_free_blocks * facts.block_size
        missing = max(0, absent + facts.num_outputs * facts.block_size - room)
        return (
            self._weights.moved_token * absent
            + node.num_queued_tokens
            + self._weights.sequence * (node.num_sequences + facts.num_outputs)
            + self._weights.missing_token * missing
        )


def make_policy(name: str, *, local_prefill_max_tokens: int) -> Policy:
    """The policy of the setting `policy`."""
    policies: dict[str, Policy] = {
        "round_robin": RoundRobin(),
        "least_loaded": LeastLoaded(),
        "prefix_aware": PrefixAware(local_prefill_max_tokens),
    }
    return policies[name]


def _cheapest(facts: RequestFacts, nodes: Sequence[_NodeT], costs: Sequence[float]) -> _NodeT:
    """Equal nodes take turns, so that an idle cluster is used evenly."""
    count = len(nodes)
    order = range(count)
    best = min(order, key=lambda i: (costs[i], -nodes[i].num_held_blocks, (i - facts.number) % count))
    return nodes[best]


def _local(facts: RequestFacts, decode: DecodeCandidate, reason: PlacementReason, candidates: Candidates) -> Placement:
    sources = () if reason is PlacementReason.SHORT_SUFFIX else _sources(facts, decode, candidates)
    return Placement(None, decode.node_id, reason, decode_sources=sources)


def _disaggregated(
    facts: RequestFacts, prefill: PrefillCandidate, decode: DecodeCandidate, candidates: Candidates
) -> Placement:
    return Placement(
        prefill.node_id,
        decode.node_id,
        PlacementReason.DISAGGREGATED,
        sources=_sources(facts, prefill, candidates),
        decode_sources=_decode_sources(decode, prefill, candidates),
    )


def _refill(facts: RequestFacts, prefill: PrefillCandidate, candidates: Candidates) -> RefillPlacement:
    return RefillPlacement(prefill.node_id, _sources(facts, prefill, candidates))


def _sources(
    facts: RequestFacts, computing: PrefillCandidate | DecodeCandidate, candidates: Candidates
) -> tuple[SourceHint, ...]:
    """Only full blocks are fetched for a prefill: the rest is computed to get the logits."""
    num_full_blocks = facts.num_prompt_tokens // facts.block_size
    return _most_held(
        SourceHint(node.node_id, min(node.num_held_blocks, num_full_blocks))
        for node in candidates.all
        if min(node.num_held_blocks, num_full_blocks) > computing.num_held_blocks
    )


def _decode_sources(
    decode: DecodeCandidate, prefill: PrefillCandidate, candidates: Candidates
) -> tuple[SourceHint, ...]:
    """The prefill node announces by itself what it has."""
    return _most_held(
        SourceHint(node.node_id, node.num_held_blocks)
        for node in candidates.all
        if node.num_held_blocks > decode.num_held_blocks and node.node_id != prefill.node_id
    )


def _most_held(holders: Iterable[SourceHint]) -> tuple[SourceHint, ...]:
    return tuple(sorted(holders, key=lambda hint: -hint.num_blocks)[:MAX_SOURCES])
