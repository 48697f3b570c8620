"""A node as the router knows it: its description, its load, and what this router has under way on it.

Invariant: what a handle says of a node belongs to one epoch; a new epoch replaces all of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import grpc

from kvrelay.core.errors import KVRelayError
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import NodeDescription, NodeLoad, NodeRole, NodeStats
from kvrelay.core.outages import Outages
from router.nodes.coming_prompts import ComingPrompts
from router.nodes.links import Links
from router.nodes.outlier import Outlier


class NodeState(Enum):
    CONNECTING = "connecting"  # not reached yet
    LIVE = "live"  # described, accepted, watched
    DRAINING = "draining"  # finishes its requests, takes no new ones
    REFUSED = "refused"  # reached, but does not fit the others
    LOST = "lost"  # was live, then its stream broke or fell silent; tried again


@dataclass(slots=True)
class NodeHandle:
    """One configured address. The registry writes state, description, load and stats; attempts count what they have
    under way, and report to `failed` or `outlier` how it went.

    `drained`: the last process here that drained, None if none has. `misfit`: why the node, as it was last
    described, can be none of this router's; None if it can. `complaint`: why the node is not live; empty while it is.
    `logged`: the complaints that the log has since the state changed. `heard_at`: when the last message of the node
    came, on the registry's clock. The registry calls `on_lost`, which fails what this router has under way at the node,
    and `on_live` when the node takes requests from now on.

    `num_queued_tokens`: prompt tokens that this router sent and that, as far as it knows, are not computed yet.
    `coming`: the prompts that these are of. `num_sequences`: outputs that this router has on the node.
    `num_claimed_blocks`: blocks that requests which were placed since `load` came need there. All four are ahead of
    `load`, which counts the requests of all routers but comes late. `outages`: of what requests need there. `links`: of
    a decode node, those from prefill nodes.
    """

    address: str
    role: NodeRole
    channel: grpc.aio.Channel
    outlier: Outlier
    outages: Outages
    links: Links
    state: NodeState = NodeState.CONNECTING
    drained: KVSource | None = None
    description: NodeDescription | None = None
    misfit: str | None = None
    load: NodeLoad = field(default_factory=NodeLoad)
    stats: NodeStats = field(default_factory=NodeStats)
    complaint: str = ""
    logged: set[str] = field(default_factory=set)
    heard_at: float | None = None
    on_lost: Callable[[KVRelayError], None] = lambda error: None
    on_live: Callable[[], None] = lambda: None
    watched: tuple[int, int] | None = None  # epoch and sequence number of the last event that the index has
    num_queued_tokens: int = 0
    coming: ComingPrompts = field(default_factory=ComingPrompts)
    num_sequences: int = 0
    num_claimed_blocks: int = 0

    @property
    def name(self) -> str:
        """Returns the node's name in messages: its address, and its id once that is known."""
        return self.address if self.description is None else f"{self.description.source.node_id} ({self.address})"

    @property
    def described(self) -> NodeDescription:
        """Returns the last description; there must have been one."""
        assert self.description is not None
        return self.description

    @property
    def source(self) -> KVSource:
        """Returns the node as it was last described; it must have been."""
        return self.described.source

    @property
    def num_free_blocks(self) -> int:
        """Counts the blocks that are free or evictable, without those that were claimed since the node counted them."""
        return max(0, self.load.num_free_blocks - self.num_claimed_blocks)

    @property
    def is_watched(self) -> bool:
        """Tells whether the node sends its updates now."""
        return self.state in (NodeState.LIVE, NodeState.DRAINING)

    def reported(self, load: NodeLoad) -> None:
        """Notes the node's load."""
        self.load = load
        self.num_claimed_blocks = 0

    def failed(self, error: KVRelayError, source: KVSource) -> None:
        """Counts a request that ended at the process `source` with `error` against the node, unless that is not live:
        one that is lost or has drained for as long as it may ends all that it has, and its state says so. While a
        client takes nothing, another process may have come in its place."""
        if self.state is NodeState.LIVE and self.source.epoch == source.epoch:
            self.outlier.failed(error)

    def succeeded(self, source: KVSource) -> None:
        """Notes that a request went well at the process `source`."""
        if self.description is not None and self.source.epoch == source.epoch:
            self.outlier.succeeded()
