"""Engines without a server: each round, a worker of each engine gets the same prompts and says how long it took.

A: a request of one output token, then one of 64, each with a prompt of its own: time per token is the difference over
63. B: all 32 requests at once, of which the engine runs 16 at a time. Nothing is streamed.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.peers.base import PeerError, Server
from bench.peers.compare import Measurement, Report
from bench.peers.processes import PeakMemory, tail
from bench.peers.workloads import Figure, settings_of
from kvrelay.bench.plan import plans_of
from kvrelay.bench.prompts import PromptBuilder, Vocabulary

WORKLOADS = ("A", "B")
OUTPUT_TOKENS = 64
CONCURRENCY = 16
WORKER_SECONDS = 900.0
_SAMPLE_SECONDS = 0.1  # a worker with a tiny model is done within two seconds


class Worker(Protocol):
    @property
    def name(self) -> str: ...

    def command(self, directory: Path, model: Path) -> list[str]:
        """A program that takes the path of a job and prints one JSON object; `run_job` says of what."""
        ...


class InProcessPeer(Worker, Protocol):
    def install(self, directory: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class KvrelayOffline:
    """Our `LLM`."""

    name: str = "kvrelay LLM"

    def command(self, directory: Path, model: Path) -> list[str]:
        return [sys.executable, "-m", "bench.peers.worker_kvrelay", str(model)]


@dataclass(frozen=True, slots=True)
class InProcessComparison:
    """`directories` are the engines' own ones; `scratch` is ours."""

    ours: Worker
    peer: Worker
    directories: Callable[[Worker], Path]
    scratch: Path
    model: Path
    vocab_size: int
    workloads: Sequence[str]
    scale: float

    def run(self, rounds: int, seed: int, report: Report) -> list[Measurement]:
        """Raises PeerError when a worker fails."""
        measurements: list[Measurement] = []
        for number in range(rounds):
            job = self._job(seed + number)
            engines = (self.ours, self.peer) if number % 2 == 0 else (self.peer, self.ours)
            for engine in engines:
                for workload, figure in self._figures(engine, job):
                    measurement = Measurement(engine.name, number, workload, figure)
                    report(str(measurement))
                    measurements.append(measurement)
        return measurements

    def _job(self, seed: int) -> Path:
        """Twice as many prompts for A, as none is used again: an engine's cache may know it."""
        prompts = {
            "first": self._prompts("A", seed * 2),
            "single": self._prompts("A", seed * 2 + 1),
            "batch": self._prompts("B", seed) if "B" in self.workloads else [],
        }
        path = self.scratch / "job.json"
        path.write_text(json.dumps({"prompts": prompts, "output_tokens": OUTPUT_TOKENS, "concurrency": CONCURRENCY}))
        return path

    def _prompts(self, workload: str, seed: int) -> list[list[int]]:
        nowhere = Server("http://127.0.0.1:1", "", 0.0)
        vocabulary = {"prompt_format": "token_ids", "vocab_size": self.vocab_size}
        [plan] = plans_of(settings_of(workload, nowhere, vocabulary, seed=seed, scale=self.scale))
        builder = PromptBuilder(Vocabulary.of_size(self.vocab_size), "token_ids", seed=seed)
        return [builder.token_ids(request.segments) for session in plan.sessions for request in session.requests]

    def _figures(self, engine: Worker, job: Path) -> list[tuple[str, Figure]]:
        directory = self.directories(engine)
        with PeakMemory(_SAMPLE_SECONDS) as memory:
            found = run_job([*engine.command(directory, self.model), str(job)], self.scratch / "worker.log")
        first, whole = (statistics.median(found[name]) for name in ("first_seconds", "single_seconds"))
        figures = [
            ("", Figure("ready after, s", found["ready_seconds"][0])),
            ("A", Figure("one token, ms", first * 1e3)),
            ("A", Figure("time per token p50, ms", (whole - first) / (OUTPUT_TOKENS - 1) * 1e3)),
        ]
        if found["batch_tokens"]:
            speed = found["batch_tokens"][0] / found["batch_seconds"][0]
            figures.append(("B", Figure("output tokens/s", speed, higher_is_better=True)))
        return [*figures, ("", Figure("peak memory, GB", memory.bytes / 1e9))]


def run_job(command: Sequence[str], log: Path) -> Mapping[str, Sequence[float]]:
    """Lists of numbers: ready_seconds (one), first_seconds and single_seconds (one per prompt), batch_seconds and
    batch_tokens (one or none). Raises PeerError."""
    with log.open("w") as output:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=output, timeout=WORKER_SECONDS)
        except subprocess.TimeoutExpired:
            raise PeerError(f"`{command[0]}` is not done (log: {log}):\n{tail(log)}") from None
    if done.returncode != 0:
        raise PeerError(f"`{' '.join(command)}` ended with status {done.returncode} (log: {log}):\n{tail(log)}")
    found: Mapping[str, Sequence[float]] = json.loads(done.stdout.splitlines()[-1])
    return found
