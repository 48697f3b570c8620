"""What a request has cost so far, and where its KV came from: counted as it happens, summed up in its trace.

Invariant: computed and cached tokens together are the prompt, whatever nodes report. Tokens that a placement after a
lost node computes once more are no part of that; they are counted as recomputed.
"""

from collections import Counter
from collections.abc import Mapping

from kvrelay.core.clock import Clock
from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.core.node_report import STORE, FetchReport, NodeRole
from router.relay.recovery_metrics import MigrationCause, RecomputationCause, RecoveryMetrics, Rung
from router.request import KVOrigins, NodeRequest, RequestTrace, RoutedRequest


class Tally:
    """The counts and times of one request. Times are in seconds since the tally was made."""

    def __init__(self, request: RoutedRequest, clock: Clock, metrics: RecoveryMetrics) -> None:
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._block_size = request.kv_namespace.block_size
        self._clock = clock
        self._metrics = metrics
        self._began = clock.now()
        self._accepted_after: float | None = None
        self._first_token_after: float | None = None
        self._handover_seconds = 0.0
        self._num_cached_tokens: int | None = None  # first ones of the prompt that none of its nodes computed
        self._num_held_tokens: int | None = None  # those that its first node was thought to hold
        self._num_transferred_blocks = 0
        self._num_migrations = 0
        self._rungs: Counter[Rung] = Counter()  # fetched blocks of all nodes, by rung
        self._recomputed: Counter[RecomputationCause] = Counter()  # tokens computed once more, by cause

    def placed(self, node_request: NodeRequest, *, num_uncached_tokens: int) -> None:
        """Notes how many tokens the node that prefills is thought to have to compute. What a replay finds beyond those
        of the first placement may be what the lost one has computed."""
        if self._num_held_tokens is None:
            self._num_held_tokens = len(node_request.token_ids) - num_uncached_tokens

    def accepted(self) -> None:
        """Notes that a node has taken the request."""
        if self._accepted_after is None:
            self._accepted_after = self._clock.now() - self._began

    def first_token(self) -> None:
        """Notes that the first token of any output has come."""
        self.accepted()
        if self._first_token_after is None:
            self._first_token_after = self._clock.now() - self._began

    def refill_began(self) -> None:
        """Counts that another prefill node was asked for blocks that did not arrive."""
        self._metrics.refill_began()

    def migrated(self, node_request: NodeRequest, cause: MigrationCause) -> None:
        """Counts that outputs were placed again, for the reason `cause`."""
        self._num_migrations += 1
        self._metrics.migrated(cause, num_tokens=len(node_request.token_ids))

    def computed(
        self,
        node_request: NodeRequest,
        *,
        num_cached_tokens: int,
        fetches: FetchReport,
        reader: NodeRole = NodeRole.PREFILL,
    ) -> None:
        """Counts what the prefilling node held (`num_cached_tokens`), fetched from others, and computed."""
        num_found_tokens = num_cached_tokens + fetches.num_tokens
        self._num_transferred_blocks += self.num_blocks(fetches.num_tokens)
        self._came_from(reader, fetches, {})
        if node_request.is_replay:
            self._recompute("migration", len(node_request.token_ids) - num_found_tokens)
            if self._num_held_tokens is not None:
                num_found_tokens = min(num_found_tokens, self._num_held_tokens)
        self._found(node_request, num_found_tokens)

    def refilled(self, node_request: NodeRequest, *, num_cached_tokens: int, fetches: FetchReport) -> None:
        """Counts what a second prefill node held, fetched and computed, because the first one's blocks did not
        arrive."""
        self._num_transferred_blocks += self.num_blocks(fetches.num_tokens)
        self._came_from(NodeRole.PREFILL, fetches, {})
        num_found_tokens = num_cached_tokens + fetches.num_tokens
        self._recompute("refill", len(node_request.token_ids) - num_found_tokens)
        self._found(node_request, num_found_tokens)

    def decode_ready(
        self,
        node_request: NodeRequest,
        *,
        num_recomputed_tokens: int,
        fetches: FetchReport,
        rungs: Mapping[str, Rung],
    ) -> None:
        """Counts what a decode node that did not prefill has fetched and computed. `rungs`: the rungs of the failure
        ladder, by the ids of the nodes that prefilled for it."""
        if self._first_token_after is not None and node_request.num_prior_output_tokens == 0:
            self._handover_seconds = self._clock.now() - self._began - self._first_token_after
        self._num_transferred_blocks += self.num_blocks(fetches.num_tokens)
        self._came_from(NodeRole.DECODE, fetches, rungs)
        self._metrics.came_from(NodeRole.DECODE, "local", num_blocks=self.num_blocks(num_recomputed_tokens))
        self._recompute("transfer", num_recomputed_tokens)
        self._found(node_request, len(node_request.token_ids) - num_recomputed_tokens)

    def trace(self, *, prefill_node: str | None, decode_node: str) -> RequestTrace:
        elapsed = self._clock.now() - self._began
        num_prompt_tokens = self._num_prompt_tokens
        num_cached_tokens = max(0, min(self._num_cached_tokens or 0, num_prompt_tokens))
        return RequestTrace(
            prefill_node=prefill_node,
            decode_node=decode_node,
            num_prompt_blocks=self.num_blocks(num_prompt_tokens),
            num_computed_tokens=num_prompt_tokens - num_cached_tokens,
            num_cached_tokens=num_cached_tokens,
            num_transferred_blocks=self._num_transferred_blocks,
            queue_seconds=elapsed if self._accepted_after is None else self._accepted_after,
            ttft_seconds=elapsed if self._first_token_after is None else self._first_token_after,
            e2e_seconds=elapsed,
            num_migrations=self._num_migrations,
            handover_seconds=self._handover_seconds,
            kv=KVOrigins(
                num_prefill_node_blocks=self._rungs["prefill_node"],
                num_holder_blocks=self._rungs["holder"],
                num_store_blocks=self._rungs["store"],
                num_refill_blocks=self._rungs["refill"],
                num_refilled_tokens=self._recomputed["refill"],
                num_recomputed_tokens=self._recomputed["transfer"],
                num_replayed_tokens=self._recomputed["migration"],
            ),
        )

    def num_blocks(self, num_tokens: int) -> int:
        """Returns how many blocks so many tokens need, the last one perhaps filled in part."""
        return num_blocks_for(num_tokens, self._block_size)

    def _found(self, node_request: NodeRequest, num_tokens: int) -> None:
        """Notes that a node has computed the prompt from there on. Each of a request's nodes computes to its end, so
        what none of them computed is what the one that began first has found."""
        if node_request.num_prior_output_tokens == 0:
            found = self._num_cached_tokens
            self._num_cached_tokens = num_tokens if found is None else min(found, num_tokens)

    def _came_from(self, reader: NodeRole, fetches: FetchReport, rungs: Mapping[str, Rung]) -> None:
        """Counts fetched blocks by rung. A node without an entry in `rungs` is on the rung `holder`."""
        for node_id, num_blocks in fetches.fetched:
            rung: Rung = "store" if node_id == STORE else rungs.get(node_id, "holder")
            self._rungs[rung] += num_blocks
            self._metrics.came_from(reader, rung, num_blocks=num_blocks)
        self._metrics.asked_in_vain(reader, "missing", num_blocks=fetches.num_missing)
        self._metrics.asked_in_vain(reader, "refused", num_blocks=fetches.num_refused)
        self._metrics.asked_in_vain(reader, "failed", num_blocks=fetches.num_failed)

    def _recompute(self, cause: RecomputationCause, num_tokens: int) -> None:
        num_tokens = max(0, num_tokens)  # below zero only if a node reports more than the prompt
        self._recomputed[cause] += num_tokens
        self._metrics.recomputed(cause, num_tokens=num_tokens)
