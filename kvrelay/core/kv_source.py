"""Where KV blocks can be fetched."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSource:
    """A holder of blocks: a node's connector, as that node described it. `epoch` changes with every start of the node;
    `endpoint` is for connectors alone."""

    node_id: str
    epoch: int
    endpoint: str
