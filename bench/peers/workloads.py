"""The four workloads that engines are compared with, and the figures of each that count.

| | requests |
|---|---|
| A | one at a time, 512 prompt tokens, 64 output tokens |
| B | 32, at most 16 at a time, 128 to 512 prompt tokens, 64 output tokens |
| C | 16 one after the other, 1,024 shared tokens and 32 of their own, 16 output tokens |
| D | 8 streams (64 prompt tokens, 256 output tokens, again and again) while a prompt of 1,500 to 2,000 tokens (16
      output tokens) arrives every 4 seconds, for 60 seconds |

Prompts are random tokens. Decoding is greedy, unless a comparison samples, and ignores end tokens where the server can.
Equal seeds give equal requests; no two workloads share a prompt, nor do two seeds.
"""

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from bench.peers.base import PromptFormat, Server
from kvrelay.bench.result import RunResult
from kvrelay.bench.settings import BenchSettings, LatencyBenchSettings, ServeBenchSettings, ThroughputBenchSettings
from kvrelay.bench.summary import Distribution

CONCURRENCY = 16  # of B
D_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One number of an engine's run, to be compared with another engine's. `higher_is_better` says how to read their
    ratios."""

    title: str
    value: float
    higher_is_better: bool = False


def settings_of(
    workload: str, server: Server, common: Mapping[str, object], *, seed: int, scale: float
) -> BenchSettings:
    """Returns the load of a workload for `kvrelay bench`, with the settings that all workloads have in `common`. A
    `scale` below 1 reduces the numbers of requests, in all and at a time, or the time, for a first look."""
    shared: dict[str, object] = {
        "url": server.url,
        "model": server.model,
        "ignore_eos": server.takes_ignore_eos,
        "keep_alive": server.keeps_connections,
        # A and B have segments of the same names: with one seed, B's first prompts would be in the cache after A.
        "seed": seed * len(WORKLOADS) + WORKLOADS.index(workload),
        "progress": "off",
        **common,
    }
    return _SETTINGS[workload](shared, scale)


def vocabulary_settings(prompt_format: PromptFormat, directory: Path, vocab_size: int) -> Mapping[str, object]:
    """Returns the settings that say which prompts are made. Prompts of text are letters, each of which is one token of
    the tokenizers of bench/random_model.py."""
    if prompt_format == "token_ids":
        return {"prompt_format": prompt_format, "vocab_size": vocab_size}
    file = directory / "letters.json"
    tokenizer = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(string.ascii_letters)}))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(file))
    return {"prompt_format": prompt_format, "tokenizer": str(file)}


def figures_of(workload: str, result: RunResult) -> list[ComparedFigure]:
    """Returns the figures that count: milliseconds and tokens per second. Raises KeyError when a kind of request has no
    result."""
    return _FIGURES[workload](result)


def _a(shared: dict[str, object], scale: float) -> BenchSettings:
    return LatencyBenchSettings.model_validate(
        {**shared, "input_len": "512", "output_len": "64", "requests": scaled(6, scale)}
    )


def _b(shared: dict[str, object], scale: float) -> BenchSettings:
    load = {"input_len": "128-512", "output_len": "64", "requests": scaled(32, scale)}
    return ThroughputBenchSettings.model_validate({**shared, **load, "concurrency": scaled(CONCURRENCY, scale)})


def _c(shared: dict[str, object], scale: float) -> BenchSettings:
    load = {"workload": "shared-prefix", "prefix_len": 1024, "input_len": "32", "output_len": "16", "concurrency": 1}
    return ServeBenchSettings.model_validate({**shared, **load, "requests": max(2, scaled(16, scale))})


def _d(shared: dict[str, object], scale: float) -> BenchSettings:
    load = {"workload": "mixed", "input_len": "64", "output_len": "256", "duration": D_SECONDS * scale}
    return ServeBenchSettings.model_validate({**shared, **load})


def scaled(count: int, scale: float) -> int:
    """Returns a number of requests with a scale, at least 1."""
    return max(1, round(count * scale))


def _figures_a(result: RunResult) -> list[ComparedFigure]:
    return [
        ComparedFigure("TTFT p50, ms", _ms(result.summary.ttft)),
        ComparedFigure("time per token p50, ms", _ms(result.summary.tpot)),
    ]


def _figures_b(result: RunResult) -> list[ComparedFigure]:
    return [
        ComparedFigure("output tokens/s", result.summary.output_tokens_per_second, higher_is_better=True),
        ComparedFigure("TTFT p50, ms", _ms(result.summary.ttft)),
        ComparedFigure("ITL p99, ms", _ms(result.summary.itl, "p99")),
    ]


def _figures_c(result: RunResult) -> list[ComparedFigure]:
    first, later = (result.by_kind[kind] for kind in ("first", "later"))
    return [ComparedFigure("first TTFT, ms", _ms(first.ttft)), ComparedFigure("later TTFT p50, ms", _ms(later.ttft))]


def _figures_d(result: RunResult) -> list[ComparedFigure]:
    steady, long = (result.by_kind[kind] for kind in ("steady", "long"))
    return [
        ComparedFigure("steady output tokens/s", steady.output_tokens_per_second, higher_is_better=True),
        ComparedFigure("steady ITL p50, ms", _ms(steady.itl)),
        ComparedFigure("steady ITL p99, ms", _ms(steady.itl, "p99")),
        ComparedFigure("long TTFT p50, ms", _ms(long.ttft)),
    ]


def _ms(distribution: Distribution | None, column: str = "p50") -> float:
    return float("nan") if distribution is None else float(getattr(distribution, column)) * 1e3


_SETTINGS: Mapping[str, Callable[[dict[str, object], float], BenchSettings]] = {"A": _a, "B": _b, "C": _c, "D": _d}
_FIGURES: Mapping[str, Callable[[RunResult], list[ComparedFigure]]] = {
    "A": _figures_a,
    "B": _figures_b,
    "C": _figures_c,
    "D": _figures_d,
}
WORKLOADS = tuple(_SETTINGS)
