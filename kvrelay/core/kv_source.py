"""Where KV blocks can be fetched."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSource:
    """A holder of blocks: a node's connector, as that node describes it. `epoch` changes with every start of the node.
    Only connectors read `endpoint`."""

    node_id: str
    epoch: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """A source that holds a prompt's first `num_blocks` blocks."""

    source: KVSource
    num_blocks: int
