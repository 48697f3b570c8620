"""What recovering from lost nodes and lost blocks takes: placements, rungs of the failure ladder, tokens computed
again.

Invariant: every series is there from the start, so that a rate sees the first event that it counts.
"""

from collections.abc import Sequence
from itertools import product
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

from kvrelay.core.node_report import NodeRole

# Values of labels.
MigrationCause = Literal["decode_node_lost", "prefill_node_lost"]
RecomputationCause = Literal["migration", "refill", "transfer"]
Rung = Literal["prefill_node", "holder", "store", "refill", "local"]
FetchFailure = Literal["missing", "refused", "failed"]
_READERS = tuple(role.value for role in NodeRole)


class RecoveryMetrics:
    """Counters in the router's CollectorRegistry, labelled with the served model's name."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        def counters(name: str, text: str, **labels: Sequence[str]) -> dict[tuple[str, ...], Counter]:
            """Returns the counters of a family by the values of its further labels."""
            family = Counter(f"kvrelay:{name}", text, ["model_name", *labels], registry=registry)
            return {values: family.labels(model_name, *values) for values in product(*labels.values())}

        self._migrations = counters(
            "request_migrations_total",
            "Placements of a request beyond its first, because a node was lost.",
            cause=get_args(MigrationCause),
        )
        self._migrated = counters(
            "migrated_tokens_total", "Tokens, prompt and output, given to another node after one was lost."
        )[()]
        self._recomputed = counters(
            "recomputed_tokens_total",
            "Tokens computed again: of a replay (migration), of blocks that could not be fetched, by another prefill "
            "node (refill) or by the decode node (transfer).",
            cause=get_args(RecomputationCause),
        )
        self._ladder_blocks = counters(
            "kv_ladder_blocks_total",
            "KV blocks a request needed at a node (reader) that did not hold them, by the rung of the failure ladder "
            "they came from: prefill_node, holder, store, refill, or local when they were computed there.",
            reader=_READERS,
            rung=get_args(Rung),
        )
        self._ladder_failures = counters(
            "kv_ladder_failures_total",
            "KV blocks that a source was asked for in vain: it did not have them (missing), they did not verify "
            "(refused), it could not be reached in time (failed).",
            reader=_READERS,
            cause=get_args(FetchFailure),
        )
        self._refills = counters(
            "kv_refills_total", "Prefills begun on another node because blocks did not arrive from the first."
        )[()]

    def migrated(self, cause: MigrationCause, *, num_tokens: int) -> None:
        """Counts that outputs were placed again, with a prompt of `num_tokens` tokens, output so far included."""
        self._migrations[(cause,)].inc()
        self._migrated.inc(num_tokens)

    def recomputed(self, cause: RecomputationCause, *, num_tokens: int) -> None:
        self._recomputed[(cause,)].inc(num_tokens)

    def came_from(self, reader: NodeRole, rung: Rung, *, num_blocks: int) -> None:
        """Counts blocks that a node of role `reader` did not hold, by the rung of the failure ladder they came from."""
        self._ladder_blocks[reader.value, rung].inc(num_blocks)

    def asked_in_vain(self, reader: NodeRole, cause: FetchFailure, *, num_blocks: int) -> None:
        self._ladder_failures[reader.value, cause].inc(num_blocks)

    def refill_began(self) -> None:
        """Counts that another prefill node was asked for blocks that did not arrive."""
        self._refills.inc()
