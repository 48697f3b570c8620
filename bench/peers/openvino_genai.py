"""OpenVINO GenAI, in process, with its continuous batching."""

from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import Setup
from bench.peers.environment import Environment
from bench.peers.processes import run

TORCH = "torch==2.13.0+cpu"
REQUIREMENTS = (TORCH, "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
WEIGHT_FORMAT = "fp16"  # of 16 bits optimum-intel writes no other


@dataclass(frozen=True, slots=True)
class OpenVinoGenAi:
    """OpenVINO GenAI's continuous batching, on the model as optimum-intel converts it: bfloat16 weights become fp16."""

    name: str = "openvino-genai"

    @property
    def setup(self) -> Setup:
        return Setup(REQUIREMENTS, ("--weight-format", WEIGHT_FORMAT))

    def install(self, directory: Path) -> None:
        environment = Environment(directory)
        if not environment.is_installed(REQUIREMENTS):
            environment.install(REQUIREMENTS, constraints=[TORCH])
            # torchvision comes along for models with images. It was built for another torch, and breaks every import.
            environment.pip("uninstall", "--yes", "torchvision")
            environment.finish(REQUIREMENTS)

    def command(self, directory: Path, model: Path) -> list[str]:
        python = Environment(directory).bin / "python"
        worker = Path(__file__).with_name("worker_openvino.py")
        # With -P the worker's folder is not in sys.path: this file there has the name of the library.
        return [str(python), "-P", str(worker), str(_converted(directory, model))]


def _converted(directory: Path, model: Path) -> Path:
    """Returns the converted model; it is converted once."""
    converted = directory / model.name
    if not (converted / "openvino_tokenizer.xml").is_file():
        program = str(Environment(directory).bin / "optimum-cli")
        arguments = ["export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
        run([program, *arguments, "--weight-format", WEIGHT_FORMAT, str(converted)], directory / "convert.log")
    return converted
