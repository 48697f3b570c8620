"""What recovering from lost nodes and lost blocks takes: placements, rungs of the failure ladder, tokens computed
again."""

from prometheus_client import CollectorRegistry, Counter


class RecoveryMetrics:
    """Counters in the router's CollectorRegistry, labelled with the served model's name."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._migrations = Counter(
            "kvrelay:request_migrations_total",
            "Placements of a request beyond its first, because a node was lost.",
            ["model_name", "cause"],
            registry=registry,
        )
        self._replayed = Counter(
            "kvrelay:replayed_tokens_total",
            "Tokens, prompt and output, given to another node after one was lost.",
            ["model_name"],
            registry=registry,
        ).labels(model_name)
        self._recomputed = Counter(
            "kvrelay:recomputed_tokens_total",
            "Tokens computed again: of a replay (migration), of blocks that could not be fetched, by another prefill "
            "node (refill) or by the decode node (transfer).",
            ["model_name", "cause"],
            registry=registry,
        )
        self._ladder_blocks = Counter(
            "kvrelay:kv_ladder_blocks_total",
            "KV blocks a request needed at a node (reader) that did not hold them, by the rung of the failure ladder "
            "they came from: prefill_node, holder, store, refill, or local when they were computed there.",
            ["model_name", "reader", "rung"],
            registry=registry,
        )
        self._ladder_failures = Counter(
            "kvrelay:kv_ladder_failures_total",
            "KV blocks that a source was asked for in vain: it did not have them (missing), they did not verify "
            "(refused), it could not be reached in time (failed).",
            ["model_name", "reader", "cause"],
            registry=registry,
        )
        self._refills = Counter(
            "kvrelay:kv_refills_total",
            "Prefills begun on another node because blocks did not arrive from the first.",
            ["model_name"],
            registry=registry,
        ).labels(model_name)

    def migrated(self, cause: str, *, num_tokens: int) -> None:
        """Counts that outputs were placed again, with a prompt of `num_tokens` tokens, output so far included."""
        self._migrations.labels(self._model_name, cause).inc()
        self._replayed.inc(num_tokens)

    def recomputed(self, cause: str, *, num_tokens: int) -> None:
        self._recomputed.labels(self._model_name, cause).inc(max(0, num_tokens))

    def came_from(self, reader: str, rung: str, *, num_blocks: int) -> None:
        """Counts blocks that a node of role `reader` did not hold, by the rung of the failure ladder they came from."""
        self._ladder_blocks.labels(self._model_name, reader, rung).inc(max(0, num_blocks))

    def asked_in_vain(self, reader: str, cause: str, *, num_blocks: int) -> None:
        self._ladder_failures.labels(self._model_name, reader, cause).inc(num_blocks)

    def refilled(self) -> None:
        """Counts that another prefill node was asked for blocks that did not arrive."""
        self._refills.inc()
