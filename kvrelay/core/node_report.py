"""What a node reports to routers: who it is, how busy it is, what its leases and connectors did, what it fetched and
what it refused.

Values only; `kvrelay.core.rpc.wire` turns them into messages and back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvrelay.core.kv.block_hash import BlockHash, KVNamespace
from kvrelay.core.kv.source import KVSource

# Raised by every change after which a router and a node of before and after it would misunderstand each other. It is 0
# for nodes that did not say it yet.
PROTOCOL = 5

STORE = ""  # in the place of a node's id: blocks came from the store that all nodes share


class NodeRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """A node's answer to Describe, fixed for its epoch. `role` is None when the reader does not know the node's kind.

    `connector`: its connectors, comma-separated, in the order in which they are tried. `max_model_len`: tokens of
    prompt and output together. `protocol`: the number of the messages that it exchanges with routers. `vocabulary`: the
    digest of its model's vocabulary, nothing if it has no tokenizer. `core_table`: the name of the table through which
    it and other nodes of its machine lend each other cores, nothing if it computes with its own only. `eos_token_ids`:
    the tokens that end an output unless a request ignores them, ascending.
    """

    role: NodeRole | None
    source: KVSource
    kv_namespace: KVNamespace
    connector: str
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    protocol: int = PROTOCOL
    vocabulary: bytes = b""
    core_table: str = ""
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """How busy a node's engine is. What a router knows is older than the node's own counts, by a few steps and the
    network's delay."""

    num_requests_running: int = 0
    num_requests_decoding: int = 0  # of the running ones, those that have only their newest token to compute
    num_requests_waiting: int = 0
    num_queued_tokens: int = 0  # prompt tokens to compute; of requests that wait all, also those that are cached
    num_free_blocks: int = 0  # free or evictable
    num_blocks: int = 0
    num_preemptions: int = 0
    num_leases: int = 0
    num_steps: int = 0
    num_borrowing_steps: int = 0  # of num_steps, those that began with cores lent by other nodes

    @property
    def kv_cache_usage(self) -> float:
        """Returns the share of the blocks that cannot be taken now."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class ConnectorCounters:
    """Counters of one connector since its node started, by name. `refused`: blocks that did not pass verification, by
    the header field for which they were refused."""

    connector: str
    counters: Mapping[str, float]
    refused: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class NodeStats:
    """What a node's leases and connectors did since it started. All of them are counters."""

    num_leases_released: int = 0
    num_leases_expired: int = 0
    num_leases_ended_early: int = 0  # while other requests waited for their blocks
    connectors: tuple[ConnectorCounters, ...] = ()


@dataclass(frozen=True, slots=True)
class RefusedBlock:
    """A block that a node fetched from `holder`, and that did not pass verification."""

    holder: KVSource
    name: BlockHash


@dataclass(frozen=True, slots=True)
class FetchReport:
    """What a node fetched for one request: `num_tokens` tokens, in leading blocks that came from the nodes in `fetched`
    (node id, or `STORE`; number of blocks).

    The other counts are of blocks that a source was asked for in vain: it did not have them (missing), they did not
    verify (refused), it could not be reached in time (failed).
    """

    num_tokens: int = 0
    fetched: tuple[tuple[str, int], ...] = ()
    num_missing: int = 0
    num_refused: int = 0
    num_failed: int = 0


NOTHING_FETCHED = FetchReport()
