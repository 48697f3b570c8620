"""transformers' own server with continuous batching."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import PromptFormat, Server, Setup
from bench.peers.environment import Environment
from bench.peers.processes import free_port, serving

TORCH = "torch==2.13.0+cpu"
REQUIREMENTS = (TORCH, "transformers[serving]==5.19.0", "requests", "psutil")
# Blocks of 256 tokens: a KV pool of 1 GiB with the shape qwen2-0.5b, which a node of ours takes by default. Otherwise
# the pool is most of the machine's memory.
_OPTIONS = ("--continuous-batching", "--device", "cpu", "--cb-num-blocks", "341")


@dataclass(frozen=True, slots=True)
class TransformersServe:
    """A server that refuses prompts of token ids, and fields that it does not know, `ignore_eos` among them."""

    name: str = "transformers"
    arguments: tuple[str, ...] = ()
    prompt_format: PromptFormat = "text"

    @property
    def setup(self) -> Setup:
        return Setup(REQUIREMENTS, (*_OPTIONS, *self.arguments))

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
        command += ["--port", str(port), *_OPTIONS, *self.arguments]
        log = directory / f"{self.name}.log"
        variables = {"PYTHONPATH": None, "OMP_NUM_THREADS": None, "HF_HUB_OFFLINE": "1"}
        # Its list of models is that of the cache, in which ours is not: an empty cache makes an empty list.
        cache = directory / "cache"
        (cache / "hub").mkdir(parents=True, exist_ok=True)
        variables["HF_HOME"] = str(cache)
        with serving(command, log, f"{url}/health", variables) as seconds:
            yield Server(url, str(model), seconds, takes_ignore_eos=False)
