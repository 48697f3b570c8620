"""Where requests are placed: the policy chooses among the nodes that can serve them, by what they hold and how busy
they are.

Invariant: a placement has only nodes that were live when it was made and can serve the request to its end.
"""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

from kvrelay.core.errors import UnavailableError
from kvrelay.core.kv.block_hash import block_hashes
from kvrelay.core.kv.source import HeldBlocks, KVSource
from kvrelay.core.node_report import NodeDescription, NodeRole
from router.nodes.coming_prompts import Beginnings, beginnings
from router.nodes.node import NodeHandle
from router.nodes.registry import Registry
from router.policies.facts import Candidates, DecodeCandidate, PrefillCandidate, RequestFacts
from router.policies.placement import PlacementReason, Policy, SourceHint
from router.relay.decode_client import DecodeClient
from router.relay.limits import RelayLimits
from router.relay.prefill_client import PrefillClient
from router.relay.resolved_placement import ClientT, NodePlacement, PrefillPlacement, ResolvedPlacement
from router.request import NodeRequest

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, and how many of its leading blocks nodes hold, by their ids."""

    facts: RequestFacts
    held: Mapping[str, int]
    beginnings: Beginnings

    def num_held_blocks(self, node: NodeHandle) -> int:
        return self.held.get(node.source.node_id, 0)

    def num_coming_blocks(self, node: NodeHandle) -> int:
        """Returns how many blocks the node holds once it has computed what this router has sent it."""
        num_common_tokens = node.coming.num_common_tokens(self.beginnings)
        return max(self.num_held_blocks(node), num_common_tokens // self.facts.block_size)


class Placer:
    """What chooses the nodes for outputs of requests, among those of a registry, which it does not own. It owns the
    clients of the nodes."""

    def __init__(self, registry: Registry, policy: Policy, limits: RelayLimits) -> None:
        self._registry = registry
        self._policy = policy
        self._prefill_clients = {
            node.address: PrefillClient(
                node.channel, node.address, lease_ttl=limits.lease_ttl, timeout=limits.node_timeout
            )
            for node in registry.prefill
        }
        self._decode_clients = {node.address: DecodeClient(node.channel, node.address) for node in registry.decode}
        for node in registry.prefill:
            node.on_lost = self._prefill_clients[node.address].lose
        for node in registry.decode:
            node.on_lost = self._decode_clients[node.address].lose
        self._numbers = itertools.count()  # numbers placements
        # Numbers refills, which would otherwise take the turns of other nodes: with two prefill nodes, one whose blocks
        # arrive nowhere would get every request that comes after its own refill.
        self._refill_numbers = itertools.count()

    async def close(self) -> None:
        """Closes the clients of the nodes."""
        await asyncio.gather(
            *(client.close() for client in self._prefill_clients.values()),
            *(client.close() for client in self._decode_clients.values()),
        )

    def place(self, node_request: NodeRequest, *, lost: Set[KVSource], last_resort: bool) -> ResolvedPlacement:
        """Returns nodes that are not among the `lost` ones; a lost decode node only as `last_resort`, if no other one
        is live. Raises UnavailableError if there is no decode node; without a prefill node, the decode node
        prefills."""
        usable = self._usable(node_request, lost)
        if not _has_decode_node(usable) and last_resort:
            everyone = self._usable(node_request, frozenset())
            usable |= {name: node for name, node in everyone.items() if node.role is NodeRole.DECODE}
        if not _has_decode_node(usable):
            self._registry.check_can_serve()
            raise UnavailableError(
                f"no decode node lives that has this request's model and takes {node_request.sampling.n} "
                f"outputs of {node_request.max_num_tokens} tokens, prompt included"
                + (" and that it has not lost" if lost and not last_resort else "")
            )
        prompt = self._prompt(node_request, next(self._numbers))
        placement = self._policy.choose(prompt.facts, _candidates(usable, prompt))
        _logger.debug("%d tokens: %s", len(node_request.token_ids), placement)
        if placement.prefill is None or not node_request.ends_with_next_token:
            chosen = usable[placement.decode]
            chosen.outlier.placed()
            chosen.num_claimed_blocks += prompt.facts.num_new_blocks(prompt.num_held_blocks(chosen))
        decode = _resolved(self._decode_clients, placement.decode, placement.decode_sources, usable, prompt)
        prefill = None
        if placement.prefill is not None:
            usable[placement.prefill].outlier.placed()
            prefill = _resolved(self._prefill_clients, placement.prefill, placement.sources, usable, prompt)
        return ResolvedPlacement(decode, prefill, placement.reason is PlacementReason.SHARED_CORES)

    def refill(
        self, node_request: NodeRequest, *, lost: Set[KVSource], reader: NodeHandle, num_missing_tokens: int
    ) -> PrefillPlacement | None:
        """Returns a prefill node that is not among the `lost` ones, for blocks of so many tokens that the decode node
        `reader` waits for in vain; None if it shall compute them."""
        usable = self._usable(node_request, lost | set(reader.links.broken()))
        prompt = self._prompt(node_request, next(self._refill_numbers))
        refill = self._policy.refill(prompt.facts, _candidates(usable, prompt), num_missing_tokens)
        if refill is None:
            return None
        usable[refill.prefill].outlier.placed()
        return _resolved(self._prefill_clients, refill.prefill, refill.sources, usable, prompt)

    def _usable(self, node_request: NodeRequest, lost: Set[KVSource]) -> dict[str, NodeHandle]:
        """Returns the live nodes that are not among the lost ones and can serve the request to its end, by id, prefill
        nodes first. What nodes were like when it was admitted says nothing of those that have come since."""
        suits = partial(_suits, node_request)
        prefill = [node for node in self._registry.live(NodeRole.PREFILL, suits) if node.source not in lost]
        # A decode node that is ejected comes before a lost one. Such a prefill node does not: without any, the prompt
        # is computed where it is decoded.
        decode = self._registry.live(NodeRole.DECODE, lambda node: node.source not in lost and suits(node))
        return {node.source.node_id: node for node in (*prefill, *decode)}

    def _prompt(self, node_request: NodeRequest, number: int) -> _Prompt:
        namespace, token_ids = node_request.kv_namespace, node_request.token_ids
        facts = RequestFacts(number, len(token_ids), node_request.sampling.n, namespace.block_size)
        if node_request.sampling.prompt_logprobs is not None:  # all of it is computed, so no block counts as held
            return _Prompt(facts, {}, ())
        root = namespace.root(cache_salt=node_request.cache_salt)
        names = block_hashes(root, token_ids, namespace.block_size, include_partial=True)
        return _Prompt(facts, self._registry.index.leading(names), beginnings(root, token_ids))


def _resolved(
    clients: Mapping[str, ClientT],
    node_id: str,
    hints: Sequence[SourceHint],
    nodes: Mapping[str, NodeHandle],
    prompt: _Prompt,
) -> NodePlacement[ClientT]:
    """Returns a node that the policy has chosen, with its client (`clients` are by address). `hints` are its sources,
    and `nodes` those that it chose among."""
    node = nodes[node_id]
    sources = tuple(HeldBlocks(nodes[hint.node_id].source, hint.num_blocks) for hint in hints)
    num_found_blocks = max([prompt.num_coming_blocks(node), *(source.num_blocks for source in sources)])
    num_uncached_tokens = prompt.facts.uncached_tokens(num_found_blocks)
    return NodePlacement(
        node, clients[node.address], node.source, sources, num_uncached_tokens, beginnings=prompt.beginnings
    )


def _suits(node_request: NodeRequest, node: NodeDescription) -> bool:
    """Tells whether a node has the model with which the request began, and room for all its outputs and for the longest
    that one may become."""
    return (
        node.kv_namespace == node_request.kv_namespace
        and node.max_model_len >= node_request.max_num_tokens
        and node.max_num_seqs >= node_request.sampling.n
    )


def _has_decode_node(nodes: Mapping[str, NodeHandle]) -> bool:
    return any(node.role is NodeRole.DECODE for node in nodes.values())


def _candidates(nodes: Mapping[str, NodeHandle], prompt: _Prompt) -> Candidates:
    """Returns the nodes as the policy sees them. A node's own counts lag behind, and ours know nothing of other
    routers: the larger of the two is nearer to the truth."""
    return Candidates(
        prefill=tuple(
            PrefillCandidate(
                node_id=node_id,
                num_held_blocks=prompt.num_held_blocks(node),
                num_coming_blocks=prompt.num_coming_blocks(node),
                num_queued_tokens=max(node.load.num_queued_tokens, node.num_queued_tokens),
                core_table=node.described.core_table,
            )
            for node_id, node in nodes.items()
            if node.role is NodeRole.PREFILL
        ),
        decode=tuple(
            DecodeCandidate(
                node_id=node_id,
                num_held_blocks=prompt.num_held_blocks(node),
                num_coming_blocks=prompt.num_coming_blocks(node),
                num_queued_tokens=max(node.load.num_queued_tokens, node.num_queued_tokens),
                core_table=node.described.core_table,
                num_sequences=max(node.load.num_requests_running + node.load.num_requests_waiting, node.num_sequences),
                num_decoding=node.load.num_requests_decoding,
                num_free_blocks=node.num_free_blocks,
                max_num_seqs=node.described.max_num_seqs,
            )
            for node_id, node in nodes.items()
            if node.role is NodeRole.DECODE
        ),
        broken=frozenset(
            (source.node_id, node_id)
            for node_id, node in nodes.items()
            for source in node.links.broken()
            if source.node_id in nodes and nodes[source.node_id].source == source
        ),
    )
