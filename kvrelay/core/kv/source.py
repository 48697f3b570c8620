"""Where KV blocks can be fetched."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSource:
    """A holder of blocks: a node's connector, as that node describes it. `epoch` changes with every start of the node.
    `endpoint` is where the connectors of other nodes ask for its blocks: nothing if it publishes to the store alone."""

    node_id: str
    epoch: int
    endpoint: str

    @property
    def is_store_only(self) -> bool:
        """Tells whether its blocks come from the store that all nodes share, and never from the node itself."""
        return not self.endpoint


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """A source that holds a prompt's first `num_blocks` blocks."""

    source: KVSource
    num_blocks: int
