"""What a policy decides, and the nodes from which the chosen ones may fetch."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from router.policies.facts import Candidates, DecodeCandidate, PrefillCandidate, RequestFacts

MAX_SOURCES = 4


@dataclass(frozen=True, slots=True)
class SourceHint:
    """A node that holds the prompt's first `num_blocks` blocks."""

    node_id: str
    num_blocks: int


class PlacementReason(Enum):
    DISAGGREGATED = "disaggregated"
    NO_PREFILL_NODE = "no_prefill_node"  # none lives, or none whose KV gets to the decode node
    SHORT_SUFFIX = "short_suffix"  # cheaper to compute where it is decoded than to move it
    PREFILL_BUSY = "prefill_busy"  # its queue takes longer than the delay that computing at the decode node causes
    SHARED_CORES = "shared_cores"  # it would take the cores on which the decode node decodes


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


class Policy(Protocol):
    def choose(self, facts: RequestFacts, candidates: Candidates) -> Placement:
        """Returns the nodes for a request; the same ones for the same arguments. A prefill node is one of
        `candidates.prefill_for` the decode node. Must be cheap: it is called once per placement, on the router's
        loop."""
        ...

    def refill(self, facts: RequestFacts, candidates: Candidates, num_missing_tokens: int) -> RefillPlacement | None:
        """Returns a prefill node for blocks that a decode node should have fetched and that no node has, of
        `num_missing_tokens` tokens in all; None if the decode node shall compute them by itself. `candidates.prefill`
        are nodes whose KV gets to it."""
        ...


def without_prefill_node(facts: RequestFacts, decode: DecodeCandidate, candidates: Candidates) -> Placement:
    """Returns the placement on `decode` alone, to which no prefill node's KV gets."""
    sources = sources_for(facts, decode, candidates)
    return Placement(None, decode.node_id, PlacementReason.NO_PREFILL_NODE, decode_sources=sources)


def disaggregated(
    facts: RequestFacts, prefill: PrefillCandidate, decode: DecodeCandidate, candidates: Candidates
) -> Placement:
    """Returns the placement on both, with the nodes from which each may fetch."""
    return Placement(
        prefill.node_id,
        decode.node_id,
        PlacementReason.DISAGGREGATED,
        sources=sources_for(facts, prefill, candidates),
        decode_sources=_decode_sources(decode, prefill, candidates),
    )


def refill_by(facts: RequestFacts, prefill: PrefillCandidate, candidates: Candidates) -> RefillPlacement:
    """Returns the refill by `prefill`, with the nodes from which it may fetch."""
    return RefillPlacement(prefill.node_id, sources_for(facts, prefill, candidates))


def sources_for(
    facts: RequestFacts, computing: PrefillCandidate | DecodeCandidate, candidates: Candidates
) -> tuple[SourceHint, ...]:
    """Returns the best nodes for `computing` to fetch from before it prefills. Only full blocks count: the tail is
    computed in any case, for the logits."""
    num_full_blocks = facts.num_prompt_tokens // facts.block_size
    return _most_held(
        SourceHint(node.node_id, min(node.num_held_blocks, num_full_blocks))
        for node in candidates.all
        if min(node.num_held_blocks, num_full_blocks) > computing.num_held_blocks
        and candidates.reaches(node.node_id, computing.node_id)
    )


def _decode_sources(
    decode: DecodeCandidate, prefill: PrefillCandidate, candidates: Candidates
) -> tuple[SourceHint, ...]:
    """Returns the best nodes for `decode` to fetch from, without the prefill node, which announces by itself what it
    has."""
    return _most_held(
        SourceHint(node.node_id, node.num_held_blocks)
        for node in candidates.all
        if node.num_held_blocks > decode.num_held_blocks
        and node.node_id != prefill.node_id
        and candidates.reaches(node.node_id, decode.node_id)
    )


def _most_held(holders: Iterable[SourceHint]) -> tuple[SourceHint, ...]:
    return tuple(sorted(holders, key=lambda hint: -hint.num_blocks)[:MAX_SOURCES])
