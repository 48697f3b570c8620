"""Which device is chosen, and what the user is told if no GPU can be used."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch

from kvrelay.core.errors import ConfigurationError
from kvrelay.engine.device import Gpu, Machine, can_build_launchers, choose_device, look_at_machine

GPU = Gpu("H200", 141 << 30, (9, 0))
WITH_GPU = Machine(torch_has_cuda=True, has_triton=True, gpu=GPU)
PROBLEMS = {
    "this torch is for CPUs only: install one built for CUDA": Machine(False, True, None),
    "torch sees no GPU: check the driver": Machine(True, True, None),
    "the GPU kernels need triton: install the package triton": Machine(True, False, GPU),
    "triton finds no C compiler or no Python.h, or cannot load what it builds: install gcc and python3-dev": Machine(
        True, True, GPU, can_build=False
    ),
    "T4 has compute capability 7.5, the kernels need 8.0: use": Machine(True, True, Gpu("T4", 16 << 30, (7, 5))),
    "this torch has kernels for sm_80 sm_90, none for RTX 5090: install a torch built for this GPU": Machine(
        True, True, Gpu("RTX 5090", 32 << 30, (12, 0)), architectures=("sm_80", "sm_90")
    ),
}


def test_auto_takes_the_gpu() -> None:
    device, reason = choose_device("auto", lambda: WITH_GPU)
    assert (str(device), reason) == ("cuda:0", "H200, 141 GiB")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_without_a_usable_gpu_auto_takes_the_cpu_and_cuda_says_what_to_do(problem: str) -> None:
    device, reason = choose_device("auto", lambda: PROBLEMS[problem])
    assert device.type == "cpu" and reason == problem.partition(":")[0]
    with pytest.raises(ConfigurationError, match=f"^device cuda: {problem}.*, or use device cpu"):
        choose_device("cuda", lambda: PROBLEMS[problem])


def test_a_rocm_gpu_is_not_refused_by_compute_capability() -> None:
    device, _ = choose_device("cuda", lambda: Machine(True, True, Gpu("MI300X", 192 << 30, None)))
    assert device.type == "cuda"


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("sm_80 sm_90", (9, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_89", (8, 6), False),
        ("sm_80", (9, 0), False),
        ("sm_100", (10, 3), True),
        ("sm_90 compute_90", (12, 0), True),
        ("compute_120", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("compute_90a", (10, 0), False),
        ("sm_100f", (10, 3), True),
        ("compute_100f", (12, 0), False),
        ("something new", (9, 0), False),
        ("", (9, 0), True),  # torch does not say
        ("gfx942", None, True),
    ],
)
def test_a_gpu_is_used_if_torch_has_kernels_that_it_runs(
    architectures: str, capability: tuple[int, int] | None, runs: bool
) -> None:
    gpu = Gpu("a GPU", 80 << 30, capability)
    machine = Machine(True, True, gpu, architectures=tuple(architectures.split()))
    assert choose_device("auto", lambda: machine)[0].type == ("cuda" if runs else "cpu")


def test_device_cpu_does_not_initialise_the_driver() -> None:
    def look() -> Machine:
        raise AssertionError("nobody asked for a GPU")

    assert choose_device("cpu", look)[0].type == "cpu"


def test_an_option_for_cpus_makes_auto_take_the_cpu_and_refuses_cuda() -> None:
    device, reason = choose_device("auto", lambda: WITH_GPU, cpu_only="quantization int8")
    assert device.type == "cpu" and reason == "quantization int8 is for CPUs"
    with pytest.raises(ConfigurationError, match="quantization int8 is for CPUs; leave it out"):
        choose_device("cuda", lambda: WITH_GPU, cpu_only="quantization int8")


def test_a_compiler_without_pythons_headers_or_none_at_all_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    assert can_build_launchers()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert can_build_launchers(), "what is in the cache needs no compiler"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    assert not can_build_launchers()
    monkeypatch.setenv("CC", "/bin/false")  # fails as a compiler does that lacks a header
    assert not can_build_launchers()
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    assert not can_build_launchers()


def test_modules_that_cannot_be_loaded_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a cache in a directory that is mounted noexec."""

    def build(source: str, name: str) -> NoReturn:
        raise ImportError("failed to map segment from shared object")

    monkeypatch.setattr("triton.runtime.build.compile_module_from_src", build)
    assert not can_build_launchers()


def test_this_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90", "compute_90"])  # of a torch that is for GPUs
    machine = look_at_machine()
    assert machine.architectures == ("sm_90", "compute_90")
    assert machine.has_triton and (machine.gpu is None or machine.torch_has_cuda)
