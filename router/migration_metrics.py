"""What lost nodes cost: how often requests were placed again, and the tokens that took, for `/metrics`."""

from prometheus_client import CollectorRegistry, Counter


class MigrationMetrics:
    """Registered with the router's CollectorRegistry, labelled with the served model's name."""

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
            "Tokens computed again: of a replay (migration), or blocks that could not be fetched (transfer).",
            ["model_name", "cause"],
            registry=registry,
        )

    def migrated(self, cause: str, *, num_tokens: int) -> None:
        """A request was placed again with so many tokens."""
        self._migrations.labels(self._model_name, cause).inc()
        self._replayed.inc(num_tokens)

    def recomputed(self, cause: str, *, num_tokens: int) -> None:
        self._recomputed.labels(self._model_name, cause).inc(max(0, num_tokens))
