"""Chooses the device to compute on, from what was asked for and what this process can use.

Invariant: the device is chosen once, before anything is loaded, and the log says which one and why.
"""

import importlib.util
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.core.config.option_types import DeviceName
from kvrelay.core.errors import ConfigurationError

_OLDEST = (8, 0)  # the lowest compute capability that the kernels support
_MODULE = "kvrelay_build_probe"
_MODULE_SOURCE = f"""
#include <Python.h>
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{_MODULE}"}};
PyMODINIT_FUNC PyInit_{_MODULE}(void) {{ return PyModule_Create(&definition); }}
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU that this process sees. `capability` is CUDA's compute capability, None for ROCm."""

    name: str
    total_bytes: int
    capability: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process has for computing on a GPU. `torch_has_cuda` tells whether torch was built for CUDA or ROCm,
    `architectures` what its kernels were compiled for (`sm_90`, ...). They are empty if it does not say."""

    torch_has_cuda: bool
    has_triton: bool
    gpu: Gpu | None
    can_build: bool = True
    architectures: tuple[str, ...] = ()

    @property
    def problem(self) -> tuple[str, str] | None:
        """Returns why no GPU can be used and what to do about it, or None if one can."""
        if not self.torch_has_cuda:
            return "this torch is for CPUs only", "install one built for CUDA (pytorch.org says how)"
        if self.gpu is None:
            return "torch sees no GPU", "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        if self.gpu.capability is not None and self.gpu.capability < _OLDEST:
            has, needed = (".".join(map(str, version)) for version in (self.gpu.capability, _OLDEST))
            return f"{self.gpu.name} has compute capability {has}, the kernels need {needed}", "use a later GPU"
        if not self._torch_has_kernels():
            return (
                f"this torch has kernels for {' '.join(self.architectures)}, none for {self.gpu.name}",
                "install a torch built for this GPU (pytorch.org says how)",
            )
        if not self.has_triton:
            return "the GPU kernels need triton", "install the package triton"
        if not self.can_build:
            return (
                "triton finds no C compiler or no Python.h, or cannot load what it builds",
                "install gcc and python3-dev or set CC, and have TRITON_CACHE_DIR where programs may be loaded from",
            )
        return None

    def _torch_has_kernels(self) -> bool:
        capability = None if self.gpu is None else self.gpu.capability
        if capability is None or not self.architectures:
            return True  # nothing says otherwise
        return any(_runs(architecture, capability) for architecture in self.architectures)


def look_at_machine() -> Machine:
    """Returns what this process has. It initialises the GPU's driver."""
    has_cuda = torch.version.cuda is not None or torch.version.hip is not None
    has_triton, gpu = importlib.util.find_spec("triton") is not None, _first_gpu()
    can_build = gpu is None or not has_triton or can_build_launchers()
    return Machine(has_cuda, has_triton, gpu, can_build, tuple(torch.cuda.get_arch_list()))


def can_build_launchers() -> bool:
    """Returns whether Triton can build and load a Python module in C, as it does to launch a kernel that it has not
    launched on this machine before. Builds a small one, which it then keeps in its cache."""
    from triton.runtime.build import compile_module_from_src

    try:
        compile_module_from_src(_MODULE_SOURCE, _MODULE)
    except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError):
        return False
    return True


def choose_device(name: DeviceName, look: Callable[[], Machine], *, cpu_only: str = "") -> tuple[torch.device, str]:
    """Returns the device and the reason for it. `look` is called only if a GPU may be used, because it initialises the
    driver. `cpu_only` names a given option that works only on a CPU, if there is one.

    Raises ConfigurationError if `name` is `cuda` and no GPU can be used."""
    cpu = torch.device("cpu")
    if name == "cpu":
        return cpu, "as asked for"
    if cpu_only:
        if name == "cuda":
            raise ConfigurationError(f"device cuda: {cpu_only} is for CPUs; leave it out, or use device cpu")
        return cpu, f"{cpu_only} is for CPUs"
    machine = look()
    if machine.problem is not None:
        problem, remedy = machine.problem
        if name == "cuda":
            raise ConfigurationError(f"device cuda: {problem}: {remedy}, or use device cpu")
        return cpu, problem
    assert machine.gpu is not None
    return torch.device("cuda", 0), f"{machine.gpu.name}, {machine.gpu.total_bytes / 2**30:.0f} GiB"


def _first_gpu() -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    capability = None if torch.version.hip is not None else (properties.major, properties.minor)
    return Gpu(properties.name, properties.total_memory, capability)


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Returns whether a GPU of this compute capability runs what was compiled for `architecture`. Machine code (`sm_`)
    runs on its own version and on later minor ones, PTX (`compute_`), which the driver compiles, on all later ones.
    With the suffix `a`, either runs on its own version only; with `f`, PTX runs where machine code does.

    Source: https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html"""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if match is None:
        return False
    kind, major, minor, suffix = match.groups()
    version = int(major), int(minor)
    if suffix == "a":
        return version == capability
    return version <= capability and (version[0] == capability[0] or (kind, suffix) == ("compute", ""))
