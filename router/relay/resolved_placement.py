"""Where a request was placed: which nodes work for it, with what the router needs to talk to them."""

from dataclasses import dataclass

from kvrelay.core.kv_source import KVSource
from router.nodes.node import HeldBlocks, NodeHandle
from router.relay.decode_client import DecodeClient
from router.relay.prefill_client import PrefillClient


@dataclass(frozen=True, slots=True)
class DecodePlacement:
    """Where to decode. `source` identifies the node as it was when the request was placed. `num_uncached_tokens`:
    prompt tokens that it computes if it prefills by itself. `sources`: nodes other than the prefill node that hold
    leading blocks, best first."""

    node: NodeHandle
    client: DecodeClient
    source: KVSource
    num_uncached_tokens: int
    sources: tuple[HeldBlocks, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillPlacement:
    """Where to prefill. `source` identifies the node as it was when the request was placed. `sources`: nodes that it
    may fetch leading blocks from, best first. `num_uncached_tokens`: prompt tokens that it computes."""

    node: NodeHandle
    client: PrefillClient
    source: KVSource
    sources: tuple[HeldBlocks, ...]
    num_uncached_tokens: int


@dataclass(frozen=True, slots=True)
class ResolvedPlacement:
    """A policy's `Placement` with node handles and clients in the place of node ids. Without `prefill` the decode node
    prefills by itself."""

    decode: DecodePlacement
    prefill: PrefillPlacement | None
