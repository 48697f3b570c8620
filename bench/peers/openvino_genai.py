"""OpenVINO GenAI, in process, with its continuous batching."""

from dataclasses import dataclass
from pathlib import Path

from bench.peers.environment import Environment
from bench.peers.processes import run

TORCH = "torch==2.13.0+cpu"
REQUIREMENTS = (TORCH, "openvino-genai", "optimum-intel[openvino]")


@dataclass(frozen=True, slots=True)
class OpenVinoGenAi:
    """The model converted by optimum-intel, weights as they are."""

    name: str = "openvino-genai"

    def install(self, directory: Path) -> None:
        environment = Environment(directory)
        if not environment.is_installed(REQUIREMENTS):
            environment.install(REQUIREMENTS, constraints=[TORCH])
            # It comes along for models with images, made for another build of torch, and then nothing can be imported.
            environment.pip("uninstall", "--yes", "torchvision")
            environment.finish(REQUIREMENTS)

    def command(self, directory: Path, model: Path) -> list[str]:
        python = Environment(directory).bin / "python"
        worker = Path(__file__).with_name("worker_openvino.py")
        # Safe path: this file, beside the worker, is called like the library.
        return [str(python), "-P", str(worker), str(_converted(directory, model))]


def _converted(directory: Path, model: Path) -> Path:
    """Once."""
    converted = directory / model.name
    if not (converted / "openvino_tokenizer.xml").is_file():
        program = str(Environment(directory).bin / "optimum-cli")
        arguments = ["export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
        run([program, *arguments, "--weight-format", "fp16", str(converted)], directory / "convert.log")
    return converted
