"""What a policy knows of a request, and of the nodes that may serve it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a policy knows of a request. `number` counts the placements of this router, or its refills; `num_outputs` is
    the request's n."""

    number: int
    num_prompt_tokens: int
    num_outputs: int
    block_size: int

    def uncached_tokens(self, num_held_blocks: int) -> int:
        """Returns how many prompt tokens a node that holds so many leading blocks has to compute: at least one, for the
        logits."""
        return max(1, self.num_prompt_tokens - num_held_blocks * self.block_size)

    def num_new_blocks(self, num_held_blocks: int) -> int:
        """Returns how many blocks a node takes that holds so many leading ones: one for each output besides."""
        absent = max(0, self.num_prompt_tokens - num_held_blocks * self.block_size)
        return -(-absent // self.block_size) + self.num_outputs


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill node that may be chosen. `num_held_blocks`: leading blocks of this prompt that it holds, as far as is
    known. `num_coming_blocks`: how many it holds, at least, once it has computed the prompts that wait there; never
    fewer. `num_queued_tokens`: tokens of these prompts that it has to compute. Nodes of the same `core_table`, if it is
    not empty, lend each other cores."""

    node_id: str
    num_held_blocks: int
    num_coming_blocks: int
    num_queued_tokens: int
    core_table: str = ""


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """A decode node that may be chosen, described as a `PrefillCandidate` is. In addition, `num_sequences` sequences
    run or wait there, of which `num_decoding` have only their newest token to compute and `max_num_seqs` may run;
    `num_free_blocks` blocks are free or evictable."""

    node_id: str
    num_held_blocks: int
    num_coming_blocks: int
    num_queued_tokens: int
    num_sequences: int
    num_free_blocks: int
    num_decoding: int
    max_num_seqs: int
    core_table: str = ""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The live nodes, in an order that does not change between requests; `decode` is not empty. `broken`: prefill and
    decode nodes, by id, between which KV does not get through."""

    prefill: tuple[PrefillCandidate, ...]
    decode: tuple[DecodeCandidate, ...]
    broken: frozenset[tuple[str, str]] = frozenset()

    @property
    def all(self) -> tuple[PrefillCandidate | DecodeCandidate, ...]:
        return (*self.prefill, *self.decode)

    def reaches(self, source: str, reader: str) -> bool:
        """Tells whether KV of the node `source` gets to the node `reader`, as far as is known."""
        return (source, reader) not in self.broken

    def prefill_for(self, decode: DecodeCandidate) -> tuple[PrefillCandidate, ...]:
        """Returns the prefill nodes whose KV gets to `decode`."""
        return tuple(node for node in self.prefill if self.reaches(node.node_id, decode.node_id))
