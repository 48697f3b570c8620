"""A node as the router knows it: what it said of itself, how busy it is, and what this router has under way on it.

Invariant: what a handle says of a node belongs to one epoch; a new epoch replaces all of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import grpc

from kvrelay.core.block_hash import KVNamespace
from kvrelay.core.errors import KVRelayError
from kvrelay.core.kv_source import KVSource
from kvrelay.core.wire import namespace_from_wire, source_from_wire, source_to_wire
from kvrelay.v1 import common_pb2, node_pb2
from router.nodes.node_stats import NodeStats
from router.nodes.outlier import Outlier


class NodeRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class NodeState(Enum):
    CONNECTING = "connecting"  # not reached yet
    LIVE = "live"  # described, accepted, watched
    EJECTED = "ejected"  # live, but requests failed on it; gets none for a while, unless it is the last one
    DRAINING = "draining"  # sees its requests through, takes no new ones
    REFUSED = "refused"  # reached, but does not fit the others
    LOST = "lost"  # was live, then its stream broke or fell silent; tried again


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """`source` holds the prompt's first `num_blocks` blocks."""

    source: KVSource
    num_blocks: int


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """What a node answers to Describe; fixed for its epoch. `role` is None when the node is of a kind we do not
    know."""

    role: NodeRole | None
    source: KVSource
    kv_namespace: KVNamespace
    connector: str
    max_model_len: int
    num_blocks: int
    vocab_size: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """As the node reported it last; lags behind by a step and the network."""

    num_requests_running: int = 0
    num_requests_decoding: int = 0
    num_requests_waiting: int = 0
    num_queued_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    num_leases: int = 0
    num_steps: int = 0
    num_lent_steps: int = 0  # with cores of other nodes

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that cannot be taken now."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


def _nothing_to_lose(error: KVRelayError) -> None:
    pass


def _nobody_waits() -> None:
    pass


@dataclass(slots=True)
class NodeHandle:
    """One configured address. The registry writes state, description, load and stats; supervisors count what they have
    under way, and tell `outlier` how it went.

    `complaint`: why it is not live, empty while it is. `heard_at`: when it last said anything, on the registry's clock.
    `on_lost`: fails what this router has under way there. `on_live`: it takes requests from now on.

    `num_queued_tokens`: prompt tokens this router sent that are not known to be computed. `num_sequences`: outputs this
    router has on the node. Both are ahead of `load`, which knows of other routers but lags.
    """

    address: str
    role: NodeRole
    channel: grpc.aio.Channel
    outlier: Outlier
    state: NodeState = NodeState.CONNECTING
    description: NodeDescription | None = None
    load: NodeLoad = NodeLoad()
    stats: NodeStats = field(default_factory=NodeStats)
    complaint: str = ""
    heard_at: float | None = None
    on_lost: Callable[[KVRelayError], None] = _nothing_to_lose
    on_live: Callable[[], None] = _nobody_waits
    watched: tuple[int, int] | None = None  # epoch and sequence number up to which its events are in the index
    num_queued_tokens: int = 0
    num_sequences: int = 0

    @property
    def name(self) -> str:
        """For messages: the node's id once it is known."""
        return self.address if self.description is None else f"{self.description.source.node_id} ({self.address})"


_ROLES = {node_pb2.NODE_ROLE_PREFILL: NodeRole.PREFILL, node_pb2.NODE_ROLE_DECODE: NodeRole.DECODE}


def held_to_wire(held: HeldBlocks) -> common_pb2.BlockSource:
    return common_pb2.BlockSource(source=source_to_wire(held.source), num_blocks=held.num_blocks)


def description_from_wire(message: node_pb2.DescribeResponse) -> NodeDescription:
    return NodeDescription(
        role=_ROLES.get(message.role),
        source=source_from_wire(message.source),
        kv_namespace=namespace_from_wire(message.kv_namespace),
        connector=message.connector,
        max_model_len=message.max_model_len,
        num_blocks=message.num_blocks,
        vocab_size=message.vocab_size,
        max_num_seqs=message.max_num_seqs,
    )


def load_from_wire(message: node_pb2.NodeLoad) -> NodeLoad:
    return NodeLoad(
        num_requests_running=message.num_requests_running,
        num_requests_decoding=message.num_requests_decoding,
        num_requests_waiting=message.num_requests_waiting,
        num_queued_tokens=message.num_queued_tokens,
        num_free_blocks=message.num_free_blocks,
        num_blocks=message.num_blocks,
        num_preemptions=message.num_preemptions,
        num_leases=message.num_leases,
        num_steps=message.num_steps,
        num_lent_steps=message.num_lent_steps,
    )
