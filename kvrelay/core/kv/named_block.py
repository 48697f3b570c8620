"""A block of a node's KV pool with its name: what the engine publishes, and what a fetch fills."""

from dataclasses import dataclass

from kvrelay.core.kv.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """Block `block_id` of the local pool under a name; the first `num_tokens` of its slots are valid."""

    block_id: int
    block_hash: BlockHash
    num_tokens: int
