"""A cluster in virtual time: sessions send requests, the router's policy and its index of blocks place them, nodes take
the time that the work costs.

The router knows its own counts at once, as the only router of a cluster does. The index hears of blocks when a prompt
is computed or has come, and when an answer has ended.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from bench.placement.nodes import DecodeNode, EventQueue, NodeCosts, NodeLimits, PrefillNode, Request
from bench.placement.pool import Pool
from bench.topology import Topology
from kvrelay.bench.base import Segment
from kvrelay.bench.workloads import Session
from kvrelay.core.kv.block_hash import BlockHash
from router.nodes.coming_prompts import STRIDE
from router.nodes.kv_index import KVIndex
from router.policies.facts import Candidates, DecodeCandidate, PrefillCandidate, RequestFacts
from router.policies.placement import Policy, SourceHint

_INDEX_CAPACITY = 4_000_000  # names


class VirtualCluster:
    """A cluster that serves one load, with `run`."""

    def __init__(self, policy: Policy, topology: Topology, costs: NodeCosts, limits: NodeLimits) -> None:
        self._policy = policy
        self._costs = costs
        self._limits = limits
        self._events = EventQueue()
        self._index = KVIndex(_INDEX_CAPACITY)
        self._numbers = itertools.count()
        self._users: dict[Request, _User] = {}
        self._ended: list[Request] = []
        self._prefill = {
            (pool := self._pool(f"prefill-{number}")).node_id: PrefillNode(
                pool, self._events, costs, limits, self._on_prefilled
            )
            for number in range(topology.prefill_nodes)
        }
        self._decode = {
            (pool := self._pool(f"decode-{number}")).node_id: DecodeNode(
                pool, self._events, costs, limits, self._on_answered
            )
            for number in range(topology.decode_nodes)
        }
        self._pools = {node_id: node.pool for node_id, node in (self._prefill | self._decode).items()}

    def run(self, sessions: Sequence[Session]) -> list[Request]:
        """Serves all requests of the sessions, and returns them in the order in which they ended.

        Raises ValueError where a request does not fit into a pool."""
        for number, session in enumerate(sessions):
            user = _User(session, number, self._limits.block_size)
            self._events.after(session.at, partial(self._send, user))
        self._events.run()
        return self._ended

    def _pool(self, node_id: str) -> Pool:
        return Pool(node_id, self._limits.num_blocks, self._index)

    def _send(self, user: "_User") -> None:
        """Places the user's next request, if there is one."""
        request = user.ask(self._events.now)
        if request is None:
            return
        if len(request.all_blocks) > self._limits.num_blocks:
            raise ValueError(f"a request needs {len(request.all_blocks)} blocks, a pool has {self._limits.num_blocks}")
        self._users[request] = user
        facts = RequestFacts(next(self._numbers), request.num_prompt_tokens, 1, self._limits.block_size)
        held = self._index.leading(request.prompt_blocks)
        placement = self._policy.choose(facts, self._candidates(request, held))
        request.decode_node = placement.decode
        request.num_claimed_blocks = facts.num_new_blocks(held.get(placement.decode, 0))
        sources = placement.decode_sources if placement.prefill is None else placement.sources
        prefilling = self._prefill[placement.prefill] if placement.prefill else self._decode[placement.decode]
        found = max([self._num_coming(prefilling, request, held), *(hint.num_blocks for hint in sources)])
        prefilling.coming.begin(request.beginnings)
        request.num_charged_tokens = facts.uncached_tokens(found)
        decode = self._decode[placement.decode]
        if placement.prefill is not None:
            decode.expect(request)
            self._prefill[placement.prefill].add(request, self._held_by(sources))
            return
        request.find(decode.pool, self._held_by(sources), self._limits.block_size)
        request.num_left_tokens = request.num_computed_tokens
        decode.expect(request)
        self._events.after(request.num_fetched_tokens * self._costs.moved_token, partial(decode.add, request))

    def _on_prefilled(self, request: Request) -> None:
        """Lets the decode node have the blocks, which have moved since the prompt began."""
        decode = self._decode[request.decode_node]
        if request.num_output_tokens == 1:
            decode.cancel(request)
            self._on_answered(request)
            return
        held = decode.pool.num_leading(request.prompt_blocks) * self._limits.block_size
        moved_at = request.began_prefill + (request.num_prompt_tokens - held) * self._costs.moved_token
        self._events.after(moved_at - self._events.now, partial(decode.add, request))

    def _on_answered(self, request: Request) -> None:
        self._ended.append(request)
        user = self._users.pop(request)
        self._events.after(user.think_time, partial(self._send, user))

    def _held_by(self, hints: Sequence[SourceHint]) -> list[Pool]:
        return [self._pools[hint.node_id] for hint in hints]

    def _num_coming(self, node: PrefillNode | DecodeNode, request: Request, held: Mapping[str, int]) -> int:
        num_common_tokens = node.coming.num_common_tokens(request.beginnings)
        return max(held.get(node.pool.node_id, 0), num_common_tokens // self._limits.block_size)

    def _candidates(self, request: Request, held: Mapping[str, int]) -> Candidates:
        return Candidates(
            prefill=tuple(
                PrefillCandidate(
                    node_id=node_id,
                    num_held_blocks=held.get(node_id, 0),
                    num_coming_blocks=self._num_coming(node, request, held),
                    num_queued_tokens=node.num_queued_tokens,
                )
                for node_id, node in self._prefill.items()
            ),
            decode=tuple(
                DecodeCandidate(
                    node_id=node_id,
                    num_held_blocks=held.get(node_id, 0),
                    num_coming_blocks=self._num_coming(node, request, held),
                    num_queued_tokens=node.num_queued_tokens,
                    num_sequences=node.num_sequences,
                    num_free_blocks=node.num_free_blocks,
                    num_decoding=node.num_decoding,
                    max_num_seqs=self._limits.max_num_seqs,
                )
                for node_id, node in self._decode.items()
            ),
        )


class _User:
    """Whoever sends the requests of a session, each after the answer to the one before."""

    def __init__(self, session: Session, number: int, block_size: int) -> None:
        self.think_time = session.think_time
        self._session = session
        self._requests = iter(session.requests)
        self._number = number
        self._block_size = block_size
        self._said: list[Segment] = []
        self._turns = itertools.count()

    def ask(self, now: float) -> Request | None:
        """Returns the next request, None after the last one."""
        if self._session.until is not None and now >= self._session.until:
            return None
        spec = next(self._requests, None)
        if spec is None:
            return None
        prompt = [*self._said, *spec.segments]
        whole = [*prompt, Segment(f"answer/{self._number}/{next(self._turns)}", spec.max_tokens)]
        if self._session.is_conversation:
            self._said = whole
        num_tokens = sum(segment.length for segment in prompt)
        names = list(_block_names(whole, self._block_size))
        prompt_blocks = names[: num_tokens // self._block_size]
        stride = max(1, STRIDE // self._block_size)
        return Request(
            num_tokens, spec.max_tokens, prompt_blocks, names, tuple(prompt_blocks[stride - 1 :: stride]), now
        )


def _block_names(segments: Sequence[Segment], block_size: int) -> Iterator[BlockHash]:
    """Yields a name for each full block of these segments' tokens. Those of equal blocks behind equal ones are
    equal."""
    digest = hashlib.sha256()
    missing = block_size
    for segment in segments:
        begin = 0
        while begin < segment.length:
            count = min(missing, segment.length - begin)
            digest.update(f"{segment.name}:{begin}:{count};".encode())
            begin += count
            missing -= count
            if not missing:
                yield BlockHash(digest.digest())
                missing = block_size
