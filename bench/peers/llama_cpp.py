"""llama.cpp's server, built from the sources in the source package of its Python binding, with the model as GGUF."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.peers.base import PeerError, PromptFormat, Server, Setup
from bench.peers.environment import Environment
from bench.peers.processes import free_port, run, serving
from kvrelay.core.process.cgroup import available_cores

VERSION = "0.3.36"
SOURCE_PACKAGE = f"llama-cpp-python=={VERSION}"
REQUIREMENTS = ("gguf==0.19.0",)
_INSTALLED = (SOURCE_PACKAGE, *REQUIREMENTS)
Weights = Literal["bf16", "f16"]
SLOTS = 16
CONTEXT_TOKENS = 40_960  # of all slots together
_SERVER_OPTIONS = ("--parallel", str(SLOTS), "--ctx-size", str(CONTEXT_TOKENS))
_BUILD_OPTIONS = ("LLAMA_CURL=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "BUILD_SHARED_LIBS=OFF")


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """A server with as many slots as the workloads have requests at a time. `weights` are those of its matrices: which
    is faster depends on the processor, and on the number of rows."""

    name: str = "llama-cpp"
    weights: Weights = "bf16"
    arguments: tuple[str, ...] = ()
    prompt_format: PromptFormat = "token_ids"

    @property
    def setup(self) -> Setup:
        return Setup(
            _INSTALLED, (f"weights={self.weights}", *_SERVER_OPTIONS, *_threads(), *self.arguments, *_BUILD_OPTIONS)
        )

    def is_installed(self, directory: Path) -> bool:
        return Environment(directory).is_installed(_INSTALLED) and _server(directory).exists()

    def install(self, directory: Path) -> None:
        """Builds the server: a quarter of an hour on two cores. Needs a C++ compiler and cmake. Raises PeerError."""
        if self.is_installed(directory):
            return
        environment = Environment(directory)
        environment.install(REQUIREMENTS)
        archive = directory / f"llama_cpp_python-{VERSION}.tar.gz"
        if not archive.exists():
            download = ("download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(directory))
            environment.pip(*download, SOURCE_PACKAGE)
        run(["tar", "-xzf", str(archive), "-C", str(directory)], environment.log)
        build = str(_build(directory))
        options = [f"-D{option}" for option in ("CMAKE_BUILD_TYPE=Release", *_BUILD_OPTIONS)]
        run(["cmake", "-S", str(_source(directory)), "-B", build, *options], environment.log)
        run(["cmake", "--build", build, "--target", "llama-server", "--parallel", "2"], environment.log)
        environment.finish(_INSTALLED)

    @contextmanager
    def serve(self, directory: Path, model: Path) -> Iterator[Server]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        gguf = _as_gguf(directory, model, self.weights)
        command = [str(_server(directory)), "--model", str(gguf), "--alias", model.name]
        command += ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
        command += [*_SERVER_OPTIONS, *_threads(), *self.arguments]
        with serving(command, directory / f"{self.name}.log", f"{url}/health") as seconds:
            # Over kept connections, some requests found theirs closed.
            yield Server(url, model.name, seconds, keeps_connections=False)


def _threads() -> tuple[str, ...]:
    """Returns how many threads the server has: by itself it counts the physical cores of the machine, whatever affinity
    and quotas leave of them."""
    cores = str(available_cores())
    return "--threads", cores, "--threads-batch", cores


def _as_gguf(directory: Path, model: Path, weights: Weights) -> Path:
    """Returns the model as GGUF; it is converted once."""
    gguf = directory / f"{model.name}-{weights}.gguf"
    if not gguf.exists():
        script = Path(__file__).with_name("write_gguf.py")
        python = Environment(directory).bin / "python"
        run([str(python), str(script), str(model), str(gguf), weights], directory / "convert.log")
    return gguf


def _source(directory: Path) -> Path:
    found = directory / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    if not found.is_dir():
        raise PeerError(f"no llama.cpp sources in {found}: remove {directory} and install again")
    return found


def _build(directory: Path) -> Path:
    return directory / f"build-{VERSION}"  # cmake refuses a folder that it has built other sources in


def _server(directory: Path) -> Path:
    return _build(directory) / "bin" / "llama-server"
