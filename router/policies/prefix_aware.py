"""The default policy: by what nodes hold and how busy they are."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from router.policies.facts import Candidates, DecodeCandidate, PrefillCandidate, RequestFacts
from router.policies.placement import (
    Placement,
    PlacementReason,
    RefillPlacement,
    SourceHint,
    disaggregated,
    refill_by,
    sources_for,
    without_prefill_node,
)

_NodeT = TypeVar("_NodeT", PrefillCandidate, DecodeCandidate)


# What things cost, in units of computing one prompt token.
_MOVED_TOKEN = 0.1  # fetch one token's KV from another node
# One more output in a decode node's running batch: each of its steps takes about one prompt token's time longer, and 64
# is an output's length. What one request fetches, later ones find: a costly prefix must not hold all of them together.
_SEQUENCE = 64.0
_WAITING = 8  # times the price of an output that begins only when another one has ended
_TOKEN_BESIDE_DECODES = 0.75  # compute one prompt token in the slack of steps that decode on all cores
_LACKING_TOKEN = 8.0  # one token without a free slot at the decode node: the request waits or preempts


class PrefixAware:
    """The policy that takes the cheapest nodes, by what they hold and how busy they are.

    Costs are in units of computing one prompt token. With h leading tokens held by a node, c held once it has computed
    what waits there, and H the most that any node holds:

        prefill node = (prompt - max(c, H)) + MOVED_TOKEN * max(0, H - c) + queued tokens
        decode node  = the prompt + queued tokens
                       + SEQUENCE * (its sequences + n + WAITING * max(0, its sequences + n - max_num_seqs))
                       + LACKING_TOKEN * max(0, prompt - h + n * block_size - free tokens)

    where the prompt is the cheapest prefill node + MOVED_TOKEN * (prompt - c). Without one, or if c > H at any decode
    node and it is less, it is what computing there costs, which delays the sequences that decode:

        (prompt - max(c, H)) * (1 + sequences that decode there) + MOVED_TOKEN * max(0, H - c)

    The cheapest decode node is taken, then the cheapest prefill node whose KV gets to it. Among equally cheap nodes the
    one that holds more wins, and equal ones take turns. (Cf. Preble, ICLR 2025, on prompts that follow others with the
    same beginning.)

    The decode node prefills by itself (conditional disaggregation) in five cases. It then fetches what others hold,
    but in the second. "Missing" are those that neither it nor anyone whose KV gets to it holds, nor its queue has:

    - No prefill node is live, or none whose KV gets to the decode node.
    - It holds all but `local_prefill_max_tokens` tokens: moving these would cost a round trip and save one small chunk.
    - So few are missing, and the prefill node would have to fetch as much of the prompt first.
    - The prefill node's queue takes longer than the delay that a prefill causes beside decodes, which is the prefill's
      own length once for each sequence that decodes there:

        missing tokens * (1 + sequences that decode there) + MOVED_TOKEN * (tokens to fetch) + its queued tokens
            <  cost of the prefill node

      So an idle decode node helps with a burst, and a busy one is left alone.
    - It decodes on cores that the prefill node has lent it. A prompt would take them back, while steps that decode wait
      for memory and could compute some of its tokens in that time. So these cost less at the decode node, but twice as
      much if other prompts have the prefill node's cores already:

        TOKEN_BESIDE_DECODES * (missing tokens + its queued tokens) * (1 or 2) + MOVED_TOKEN * (tokens to fetch)
            <=  cost of the prefill node

      The prompt then yields to decodes: it gets only as many tokens of a step as hardly delay them.

    `local_prefill_max_tokens` 0 switches all but the first case off. (Cf. DistServe, OSDI 2024, on interference;
    Sarathi-Serve, OSDI 2024, on prompts in the slack of decodes; Mooncake, FAST 2025, on cache-aware prefill
    scheduling.)
    """

    def __init__(self, local_prefill_max_tokens: int = 64, *, sequence_price: float = _SEQUENCE) -> None:
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._sequence_price = sequence_price

    def choose(self, facts: RequestFacts, candidates: Candidates) -> Placement:
        most_held = max(node.num_held_blocks for node in candidates.all)
        prefill_costs = {node.node_id: self._prefill_cost(facts, node, most_held) for node in candidates.prefill}
        prompt_costs = self._prompt_costs(facts, candidates, most_held, prefill_costs)
        decode_costs = [
            cost + self._load_cost(facts, node) for cost, node in zip(prompt_costs, candidates.decode, strict=True)
        ]
        decode = _cheapest(facts, candidates.decode, decode_costs)
        if not (usable := candidates.prefill_for(decode)):
            return without_prefill_node(facts, decode, candidates)
        costs = [prefill_costs[node.node_id] for node in usable]
        prefill = _cheapest(facts, usable, costs)
        limit = self._local_prefill_max_tokens
        if limit and facts.uncached_tokens(decode.num_held_blocks) <= limit:
            return Placement(None, decode.node_id, PlacementReason.SHORT_SUFFIX)
        sources = sources_for(facts, decode, candidates)
        reason = self._why_local(facts, decode, prefill, sources, min(costs)) if limit else None
        if reason is not None:
            return Placement(None, decode.node_id, reason, decode_sources=sources)
        return disaggregated(facts, prefill, decode, candidates)

    def _why_local(
        self,
        facts: RequestFacts,
        decode: DecodeCandidate,
        prefill: PrefillCandidate,
        sources: Sequence[SourceHint],
        cost: float,
    ) -> PlacementReason | None:
        """Returns why `decode` prefills with what it fetches from `sources`, None if `prefill` does, at which it has
        this cost."""
        held = sources[0].num_blocks if sources else decode.num_held_blocks
        is_short = facts.uncached_tokens(held) <= self._local_prefill_max_tokens
        if is_short and prefill.num_held_blocks <= decode.num_held_blocks:
            return PlacementReason.SHORT_SUFFIX
        missing = facts.uncached_tokens(max(held, decode.num_coming_blocks))
        moved_cost = _MOVED_TOKEN * (held - decode.num_held_blocks) * facts.block_size
        computed = missing + decode.num_queued_tokens
        on_borrowed_cores = decode.num_decoding > 0 and decode.core_table == prefill.core_table != ""
        factor = _TOKEN_BESIDE_DECODES * (2 if prefill.num_queued_tokens else 1)
        if on_borrowed_cores and factor * computed + moved_cost <= cost:
            return PlacementReason.SHARED_CORES
        if computed + missing * decode.num_decoding + moved_cost < cost:
            return PlacementReason.PREFILL_BUSY
        return None

    def refill(self, facts: RequestFacts, candidates: Candidates, num_missing_tokens: int) -> RefillPlacement | None:
        """Returns the cheapest prefill node, unless so few tokens are missing that `choose` would have left them to the
        decode node."""
        if not candidates.prefill or num_missing_tokens <= self._local_prefill_max_tokens:
            return None
        most_held = max(node.num_held_blocks for node in candidates.all)
        costs = [self._prefill_cost(facts, node, most_held) for node in candidates.prefill]
        return refill_by(facts, _cheapest(facts, candidates.prefill, costs), candidates)

    def _prefill_cost(self, facts: RequestFacts, node: PrefillCandidate, most_held: int) -> float:
        return _prompt_cost(facts, node, most_held) + node.num_queued_tokens

    def _prompt_costs(
        self, facts: RequestFacts, candidates: Candidates, most_held: int, prefill_costs: Mapping[str, float]
    ) -> Iterator[float]:
        """Yields what the prompt costs at each decode node."""
        follows = any(node.num_coming_blocks > most_held for node in candidates.decode)
        cheapest = min(prefill_costs.values(), default=math.inf)
        for node in candidates.decode:
            if candidates.broken:
                cheapest = min((prefill_costs[p.node_id] for p in candidates.prefill_for(node)), default=math.inf)
            absent = max(0, facts.num_prompt_tokens - node.num_coming_blocks * facts.block_size)
            cost = cheapest + _MOVED_TOKEN * absent
            if math.isinf(cost) or (follows and self._local_prefill_max_tokens):
                cost = min(cost, _prompt_cost(facts, node, most_held, num_delayed=node.num_decoding))
            yield cost

    def _load_cost(self, facts: RequestFacts, node: DecodeCandidate) -> float:
        lacking = max(0, facts.num_new_blocks(node.num_held_blocks) - node.num_free_blocks)
        num_sequences = node.num_sequences + facts.num_outputs
        return (
            node.num_queued_tokens
            + self._sequence_price * (num_sequences + _WAITING * max(0, num_sequences - node.max_num_seqs))
            + _LACKING_TOKEN * lacking * facts.block_size
        )


def _prompt_cost(
    facts: RequestFacts, node: PrefillCandidate | DecodeCandidate, most_held: int, *, num_delayed: int = 0
) -> float:
    """Returns what it costs a node to prefill, with up to `most_held` blocks from others, while `num_delayed` sequences
    wait for each token that it computes."""
    moved = max(0, most_held - node.num_coming_blocks) * facts.block_size
    computed = facts.uncached_tokens(max(most_held, node.num_coming_blocks))
    return computed * (1 + num_delayed) + _MOVED_TOKEN * moved


def _cheapest(facts: RequestFacts, nodes: Sequence[_NodeT], costs: Sequence[float]) -> _NodeT:
    """Returns the node with the lowest cost. Equal nodes take turns, so that an idle cluster is used evenly."""
    count = len(nodes)
    order = range(count)
    best = min(order, key=lambda i: (costs[i], -nodes[i].num_held_blocks, (i - facts.number) % count))
    return nodes[best]
