"""Where the engine computes: what was asked for against what this process has.

Invariant: a device is chosen once, before anything is loaded, and the log says which and why.
"""

import importlib.util
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from kvrelay.core.errors import ConfigurationError

DeviceName = Literal["auto", "cpu", "cuda"]

_OLDEST = (8, 0)  # compute capability; what the kernels are compiled for at least
_MODULE = "kvrelay_build_probe"
_MODULE_SOURCE = f"""
#include <Python.h>
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{_MODULE}"}};
PyMODINIT_FUNC PyInit_{_MODULE}(void) {{ return PyModule_Create(&definition); }}
"""


@dataclass(frozen=True, slots=True)
class Card:
    """The first card that this process sees. `capability` is None for ROCm, whose versions are not CUDA's."""

    name: str
    total_bytes: int
    capability: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What of a GPU there is. `torch_has_cuda`: torch was built for CUDA or ROCm."""

    torch_has_cuda: bool
    has_triton: bool
    card: Card | None
    can_build: bool = True

    @property
    def problem(self) -> tuple[str, str] | None:
        """Why no card can be used, and what to do about it; None when one can."""
        if not self.torch_has_cuda:
            return "this torch is for CPUs only", "install one built for CUDA (pytorch.org says how)"
        if self.card is None:
            return "torch sees no card", "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        if self.card.capability is not None and self.card.capability < _OLDEST:
            has, needed = (".".join(map(str, version)) for version in (self.card.capability, _OLDEST))
            return f"{self.card.name} has compute capability {has}, the kernels need {needed}", "use a later card"
        if not self.has_triton:
            return "the GPU kernels need triton", "install the package triton"
        if not self.can_build:
            return "triton finds no C compiler, or no Python.h", "install gcc and python3-dev, or set CC"
        return None


def look_at_machine() -> Machine:
    has_cuda = torch.version.cuda is not None or torch.version.hip is not None
    has_triton, card = importlib.util.find_spec("triton") is not None, _first_card()
    return Machine(has_cuda, has_triton, card, can_build=card is None or not has_triton or can_build_launchers())


def can_build_launchers() -> bool:
    """Returns whether Triton can build a Python module in C, as it does to launch a kernel that it has not launched on
    this machine before. Builds a small one, which it then keeps in its cache."""
    from triton.runtime.build import compile_module_from_src

    try:
        compile_module_from_src(_MODULE_SOURCE, _MODULE)
    except (OSError, RuntimeError, subprocess.CalledProcessError):
        return False
    return True


def choose_device(name: DeviceName, look: Callable[[], Machine], *, cpu_only: str = "") -> tuple[torch.device, str]:
    """The device, and why it. `look` is called only where a card may be used: it wakes the driver. `cpu_only` names an
    option that was given and works on a CPU only, if there is one.

    Raises ConfigurationError for `cuda` where that cannot be had."""
    cpu = torch.device("cpu")
    if name == "cpu":
        return cpu, "as asked for"
    if cpu_only:
        if name == "cuda":
            raise ConfigurationError(f"--device cuda: {cpu_only} is for CPUs; leave it out, or use --device cpu")
        return cpu, f"{cpu_only} is for CPUs"
    machine = look()
    if machine.problem is not None:
        problem, remedy = machine.problem
        if name == "cuda":
            raise ConfigurationError(f"--device cuda: {problem}: {remedy}, or use --device cpu")
        return cpu, problem
    assert machine.card is not None
    return torch.device("cuda", 0), f"{machine.card.name}, {machine.card.total_bytes / 2**30:.0f} GiB"


def _first_card() -> Card | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    capability = None if torch.version.hip is not None else (properties.major, properties.minor)
    return Card(properties.name, properties.total_memory, capability)
