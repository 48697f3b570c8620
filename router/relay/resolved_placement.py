"""Where a request was placed: which nodes work for it, with what the router needs to talk to them."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvrelay.core.kv.source import HeldBlocks, KVSource
from router.nodes.coming_prompts import Beginnings
from router.nodes.node import NodeHandle
from router.relay.decode_client import DecodeClient
from router.relay.prefill_client import PrefillClient

ClientT = TypeVar("ClientT", bound=DecodeClient | PrefillClient)


@dataclass(frozen=True, slots=True)
class NodePlacement(Generic[ClientT]):
    """One of the nodes. `source` identifies it as it was when the request was placed. `sources`: nodes that it may
    fetch leading blocks from, best first. If it prefills, it computes `num_uncached_tokens` tokens of the prompt with
    these `beginnings`, as far as is known."""

    node: NodeHandle
    client: ClientT
    source: KVSource
    sources: tuple[HeldBlocks, ...]
    num_uncached_tokens: int
    beginnings: Beginnings


DecodePlacement = NodePlacement[DecodeClient]
PrefillPlacement = NodePlacement[PrefillClient]


@dataclass(frozen=True, slots=True)
class ResolvedPlacement:
    """A policy's `Placement` with node handles and clients in the place of node ids. Without `prefill` the decode node
    prefills by itself, and with `yields_to_decodes` in steps that are hardly longer for it."""

    decode: DecodePlacement
    prefill: PrefillPlacement | None
    yields_to_decodes: bool

    def without_sources(self) -> "ResolvedPlacement":
        """Returns the same nodes, which are told of no others to fetch blocks from."""
        prefill = None if self.prefill is None else replace(self.prefill, sources=())
        return replace(self, decode=replace(self.decode, sources=()), prefill=prefill)
