"""The router's own metrics, under the names that other servers of this kind use. Each router has a registry of its own.

Invariant: every admitted request ends in exactly one of `request_success` and `request_errors`. Every series is there
from the start, so that a rate sees the first event that it counts.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from kvrelay.core.errors import REPORTED_CODES, status_of
from kvrelay.core.generation.outputs import FinishReason

# Beyond what the router's defaults allow: requests take 10 minutes at most, and wait for a node for 2.
_LONG = (20, 40, 80, 160, 320, 640)
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, *_LONG)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, *_LONG)
_E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)


class RouterMetrics:
    """The metrics, labelled with the served model's name. Times are in seconds."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"kvrelay:{name}", text, ["model_name"], buckets=buckets, registry=registry)
            return family.labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"kvrelay:{name}", text, ["model_name"], registry=registry).labels(model_name)

        self.registry = registry
        self._model_name = model_name
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From the admitted request to its first token.", _TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two messages with tokens of one output.", _ITL_BUCKETS
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From the admitted request to its last token.", _E2E_BUCKETS
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of admitted requests.")
        self.generation_tokens = counter("generation_tokens_total", "Tokens sent to clients.")
        self.prompt_tokens_cached = counter("prompt_tokens_cached_total", "Prompt tokens no node had to compute.")
        self.num_requests_running = Gauge(
            "kvrelay:num_requests_running", "Requests admitted and not ended.", ["model_name"], registry=registry
        ).labels(model_name)
        self._success = Counter(
            "kvrelay:request_success_total", "Ended requests.", ["model_name", "finished_reason"], registry=registry
        )
        self._errors = Counter(
            "kvrelay:request_errors_total", "Refused or failed requests.", ["model_name", "code"], registry=registry
        )
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
            self._success.labels(model_name, reason.value)
        for code in REPORTED_CODES:
            self._errors.labels(model_name, code.name)

    async def page(self) -> bytes:
        """Returns all that is registered, in Prometheus' text format. What it says is of one turn of the event loop; it
        is written in a thread, since for a hundred nodes that takes long."""
        return await asyncio.to_thread(generate_latest, _Collected(list(self.registry.collect())))

    def count_success(self, reason: FinishReason) -> None:
        self._success.labels(self._model_name, reason.value).inc()

    def count_error(self, error: Exception) -> None:
        """Counts a failed request by its gRPC status code."""
        self._errors.labels(self._model_name, status_of(error).grpc_code.name).inc()


@dataclass(frozen=True, slots=True)
class _Collected:
    """Families that were collected already, in place of the registry that they are of."""

    families: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families
