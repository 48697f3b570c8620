"""transformers' own server with continuous batching."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import Server
from bench.peers.environment import Environment
from bench.peers.processes import free_port, serving

TORCH = "torch==2.13.0+cpu"
REQUIREMENTS = (TORCH, "transformers[serving]==5.19.0", "requests", "psutil")


@dataclass(frozen=True, slots=True)
class TransformersServe:
    """It takes text only: prompts of token ids are not part of what it serves."""

    name: str = "transformers"

    def install(self, directory: Path) -> None:
        environment = Environment(directory)
        if not environment.is_installed(REQUIREMENTS):
            environment.install(REQUIREMENTS, constraints=[TORCH])
            environment.finish(REQUIREMENTS)

    @contextmanager
    def serve(self, directory: Path, model: Path) -> Iterator[Server]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [str(Environment(directory).bin / "transformers"), "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--continuous-batching", "--device", "cpu"]
        log = directory / f"{self.name}.log"
        environment = {"PYTHONPATH": None, "OMP_NUM_THREADS": None, "HF_HUB_OFFLINE": "1"}
        with serving(command, log, f"{url}/health", environment) as (process, seconds):
            yield Server(url, str(model), (process,), seconds, prompt_format="text")
