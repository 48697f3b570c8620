"""Which settings a workload reads. One that it would ignore is an error, or its figures would be of another load than
the one that was asked for."""

from collections.abc import Collection, Mapping

from kvrelay.core.config.fields import flag_of
from kvrelay.core.errors import ConfigurationError

_COUNTED = frozenset({"requests", "input_len", "output_len", "request_rate", "burstiness", "concurrency"})
SETTINGS_OF: Mapping[str, frozenset[str]] = {
    "random": _COUNTED,
    "shared-prefix": _COUNTED | {"prefix_len", "num_prefixes"},
    "multi-turn": _COUNTED | {"turns", "think_time"},
    "mixed": frozenset(
        {"input_len", "output_len", "streams", "long_input_len", "long_output_len", "long_every", "duration"}
    ),
    "trace": frozenset({"trace", "speedup", "limit", "concurrency"}),
    "dataset": frozenset({"dataset", "limit", "output_len", "request_rate", "burstiness", "concurrency"}),
}
"""The settings that only some workloads read, by workload. What is in none of these sets applies to all."""

_INSTEAD: Mapping[tuple[str, str], str] = {
    ("mixed", "requests"): "--duration says when it ends",
    ("mixed", "request_rate"): "--streams and --long-every say what arrives",
    ("mixed", "burstiness"): "--streams and --long-every say what arrives",
    ("mixed", "concurrency"): "--streams says how many requests run beside the long ones",
    ("trace", "requests"): "--limit takes so many requests from its beginning",
    ("trace", "request_rate"): "it has its own times, which --speedup shortens",
    ("trace", "burstiness"): "it has its own times, which --speedup shortens",
    ("trace", "input_len"): "--trace FILE has its own lengths",
    ("trace", "output_len"): "--trace FILE has its own lengths",
    ("dataset", "requests"): "--limit takes so many requests from the beginning of the file",
    ("dataset", "input_len"): "--dataset FILE has its own lengths",
}


def check_applicable(workload: str, given: Collection[str]) -> None:
    """Raises ConfigurationError for the first setting in `given` that the workload does not read; the message names the
    flag to use in its place, or the workloads that the flag belongs to."""
    applicable = SETTINGS_OF[workload]
    for name in sorted(given):
        owners = [owner for owner, names in SETTINGS_OF.items() if name in names]
        if owners and name not in applicable:
            remedy = _INSTEAD.get((workload, name)) or f"it belongs to --workload {' or '.join(owners)}"
            raise ConfigurationError(f"{flag_of(name)} has no effect with --workload {workload}: {remedy}")
