"""Engines without a server: in each round, a worker of each engine gets the same prompts and says how long it took.

A: one request of one output token, then one of 64, each with a prompt of its own; time per token is the difference
divided by 63. B: all 32 requests at once, of which the engine runs 16 at a time. Nothing is streamed.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.disturbances import Disturbances
from bench.load_prompts import prompts_of
from bench.peers.base import Server, Setup
from bench.peers.compare import Findings, Measurement, order_of_round
from bench.peers.processes import PeakMemory, output_of
from bench.peers.work import Work
from bench.peers.workloads import CONCURRENCY, ComparedFigure, scaled, settings_of

WORKLOADS = ("A", "B")
OUTPUT_TOKENS = 64
WORKER_SECONDS = 900.0
_SAMPLE_SECONDS = 0.1  # a worker with a tiny model is done within two seconds

Prompts = Mapping[str, Sequence[Sequence[int]]]


class Worker(Protocol):
    @property
    def name(self) -> str: ...

    def command(self, directory: Path, model: Path) -> list[str]:
        """Returns a program that takes the path of a job as its last argument and prints one JSON object, which
        `run_job` describes."""
        ...


class InProcessPeer(Worker, Protocol):
    @property
    def setup(self) -> Setup: ...

    def install(self, directory: Path) -> None:
        """Installs the peer, unless it is installed already. Raises PeerError."""
        ...


@dataclass(frozen=True, slots=True)
class KvrelayOffline:
    """kvrelay's `LLM`."""

    name: str = "kvrelay LLM"

    def command(self, directory: Path, model: Path) -> list[str]:
        return [sys.executable, "-m", "bench.peers.worker_kvrelay", str(model)]


@dataclass(frozen=True, slots=True)
class InProcessComparison:
    """Two workers. `directory_of` maps each to its own directory; `scratch` is for the job and the log."""

    ours: Worker
    peer: Worker
    directory_of: Callable[[Worker], Path]
    scratch: Path
    model: Path
    vocab_size: int
    workloads: Sequence[str]
    scale: float

    def run(self, rounds: int, seed: int, findings: Findings) -> None:
        """Raises PeerError when a worker fails or makes fewer tokens than asked for."""
        for number in range(rounds):
            prompts = self._all_prompts(seed + number)
            for engine in order_of_round(self.ours, self.peer, number):
                self._measure(engine, prompts, number, findings)

    def _all_prompts(self, seed: int) -> Prompts:
        """Returns the prompts of a job. A has two different ones for each request, and the batch that comes before that
        of B others than this, since an engine may have cached what it has seen before."""
        has_batch = "B" in self.workloads
        return {
            "first": self._prompts("A", seed * 2),
            "single": self._prompts("A", seed * 2 + 1),
            "warm_batch": self._prompts("B", seed * 2) if has_batch else [],
            "batch": self._prompts("B", seed * 2 + 1) if has_batch else [],
        }

    def _prompts(self, workload: str, seed: int) -> list[list[int]]:
        nowhere = Server("http://127.0.0.1:1", "", 0.0)
        vocabulary = {"prompt_format": "token_ids", "vocab_size": self.vocab_size}
        return prompts_of(settings_of(workload, nowhere, vocabulary, seed=seed, scale=self.scale))

    def _measure(self, engine: Worker, prompts: Prompts, number: int, findings: Findings) -> None:
        job = self.scratch / "job.json"
        concurrency = scaled(CONCURRENCY, self.scale)
        job.write_text(json.dumps({"prompts": prompts, "output_tokens": OUTPUT_TOKENS, "concurrency": concurrency}))
        command = [*engine.command(self.directory_of(engine), self.model), str(job)]
        disturbances = Disturbances()
        with PeakMemory(_SAMPLE_SECONDS) as memory:
            found = run_job(command, self.scratch / "worker.log")
        findings.add_work(
            [
                _work(engine.name, number, workload, kind, prompts[kind], found[f"{kind}_tokens"])
                for workload, kind in (("A", "single"), ("B", "batch"))
                if prompts[kind]
            ]
        )
        flaws = disturbances.flaws()
        for workload, figure in figures_of(found):
            findings.add(Measurement(engine.name, number, workload, figure, flaws))
        findings.add(Measurement(engine.name, number, "", ComparedFigure("peak memory, GB", memory.bytes / 1e9)))


def _work(
    engine: str, number: int, workload: str, kind: str, prompts: Sequence[Sequence[int]], tokens: Sequence[float]
) -> Work:
    return Work(
        engine,
        number,
        workload,
        kind,
        requests=len(prompts),
        short=len(prompts) - sum(count >= OUTPUT_TOKENS for count in tokens),
        prompt_tokens=sum(map(len, prompts)),
        output_tokens=int(sum(tokens)),
    )


def figures_of(found: Mapping[str, Sequence[float]]) -> list[tuple[str, ComparedFigure]]:
    """Returns the figures of what `run_job` has returned, each with its workload."""
    first, whole = (statistics.median(found[name]) for name in ("first_seconds", "single_seconds"))
    figures = [
        ("", ComparedFigure("ready after, s", found["ready_seconds"][0])),
        ("A", ComparedFigure("one token, ms", first * 1e3)),
        ("A", ComparedFigure("time per token p50, ms", (whole - first) / (OUTPUT_TOKENS - 1) * 1e3)),
    ]
    if found["batch_seconds"]:
        speed = sum(found["batch_tokens"]) / found["batch_seconds"][0]
        figures.append(("B", ComparedFigure("output tokens/s", speed, higher_is_better=True)))
    return figures


def run_job(command: Sequence[str], log: Path) -> Mapping[str, Sequence[float]]:
    """Runs a worker and returns its lists of numbers: `ready_seconds` (one), `first_seconds`, `single_seconds` and
    `single_tokens` (one per prompt), `batch_seconds` (one, or none without a batch), `batch_tokens` (one per prompt).
    Tokens are those that were made. Raises PeerError."""
    with log.open("w") as output:
        printed = output_of(command, log, stdout=subprocess.PIPE, stderr=output, seconds=WORKER_SECONDS)
    found: Mapping[str, Sequence[float]] = json.loads(printed.splitlines()[-1])
    return found
