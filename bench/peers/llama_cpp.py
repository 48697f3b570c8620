"""llama.cpp's server, built from the sources that its Python binding's source package carries, on the model as GGUF."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import PeerError, PromptFormat, Server
from bench.peers.environment import Environment
from bench.peers.processes import free_port, run, serving

SOURCE_PACKAGE = "llama-cpp-python==0.3.16"
REQUIREMENTS = ("gguf==0.17.1",)
SLOTS = 16
CONTEXT_TOKENS = 40_960  # of all slots together
_OPTIONS = ("LLAMA_CURL=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "BUILD_SHARED_LIBS=OFF")


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """With as many slots as the workloads have requests at a time."""

    name: str = "llama-cpp"
    prompt_format: PromptFormat = "token_ids"

    def install(self, directory: Path) -> None:
        """A quarter of an hour on two cores; needs a C++ compiler and cmake."""
        environment = Environment(directory)
        if environment.is_installed(REQUIREMENTS) and _server(directory).exists():
            return
        environment.install(REQUIREMENTS)
        if not list(directory.glob("llama_cpp_python-*.tar.gz")):
            download = ("download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(directory))
            environment.pip(*download, SOURCE_PACKAGE)
        [archive] = directory.glob("llama_cpp_python-*.tar.gz")
        run(["tar", "-xzf", str(archive), "-C", str(directory)], environment.log)
        build = str(directory / "build")
        options = [f"-D{option}" for option in ("CMAKE_BUILD_TYPE=Release", *_OPTIONS)]
        run(["cmake", "-S", str(_source(directory)), "-B", build, *options], environment.log)
        run(["cmake", "--build", build, "--target", "llama-server", "--parallel", "2"], environment.log)
        environment.finish(REQUIREMENTS)

    @contextmanager
    def serve(self, directory: Path, model: Path) -> Iterator[Server]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [str(_server(directory)), "--model", str(_as_gguf(directory, model)), "--alias", model.name]
        command += ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
        command += ["--parallel", str(SLOTS), "--ctx-size", str(CONTEXT_TOKENS)]
        with serving(command, directory / f"{self.name}.log", f"{url}/health") as seconds:
            # Its HTTP library closes a connection after five requests.
            yield Server(url, model.name, seconds, keeps_connections=False)


def _as_gguf(directory: Path, model: Path) -> Path:
    """Converted once."""
    gguf = directory / f"{model.name}.gguf"
    if not gguf.exists():
        script = Path(__file__).with_name("write_gguf.py")
        python = Environment(directory).bin / "python"
        run([str(python), str(script), str(model), str(gguf)], directory / "convert.log")
    return gguf


def _source(directory: Path) -> Path:
    found = list(directory.glob("llama_cpp_python-*/vendor/llama.cpp"))
    if not found:
        raise PeerError(f"no llama.cpp sources in {directory}: remove the directory and install again")
    return found[0]


def _server(directory: Path) -> Path:
    return directory / "build" / "bin" / "llama-server"
