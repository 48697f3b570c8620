"""Policies that ignore what nodes hold: in turn, or by load alone."""

from router.policies.facts import Candidates, RequestFacts
from router.policies.placement import Placement, RefillPlacement, disaggregated, refill_by, without_prefill_node


class RoundRobin:
    """The policy that gives requests to all nodes in turn."""

    def choose(self, facts: RequestFacts, candidates: Candidates) -> Placement:
        decode = candidates.decode[facts.number % len(candidates.decode)]
        if not (usable := candidates.prefill_for(decode)):
            return without_prefill_node(facts, decode, candidates)
        prefill = usable[facts.number % len(usable)]
        return disaggregated(facts, prefill, decode, candidates)

    def refill(self, facts: RequestFacts, candidates: Candidates, num_missing_tokens: int) -> RefillPlacement | None:
        if not candidates.prefill:
            return None
        return refill_by(facts, candidates.prefill[facts.number % len(candidates.prefill)], candidates)


class LeastLoaded:
    """The policy that takes the prefill node with the fewest queued tokens and the decode node with the fewest
    sequences, whatever blocks they hold."""

    def choose(self, facts: RequestFacts, candidates: Candidates) -> Placement:
        decode = min(candidates.decode, key=lambda node: (node.num_sequences, -node.num_free_blocks))
        if not (usable := candidates.prefill_for(decode)):
            return without_prefill_node(facts, decode, candidates)
        prefill = min(usable, key=lambda node: node.num_queued_tokens)
        return disaggregated(facts, prefill, decode, candidates)

    def refill(self, facts: RequestFacts, candidates: Candidates, num_missing_tokens: int) -> RefillPlacement | None:
        if not candidates.prefill:
            return None
        return refill_by(facts, min(candidates.prefill, key=lambda node: node.num_queued_tokens), candidates)
