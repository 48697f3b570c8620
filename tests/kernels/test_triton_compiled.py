"""Every kernel, as it is launched, compiles ahead of time for five kinds of GPUs; none is needed for that."""

import importlib
import pkgutil
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paged_kernels.gpu.device
import pytest
import torch
import triton
from paged_kernels.gpu.launch import Argument, GpuTraits, KernelCall
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.triton_launches import all_launches

_TYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU to compile for. `only`: a part of the names of the launches that are compiled for it."""

    target: Any
    traits: GpuTraits
    only: str = ""

    def launches(self) -> dict[str, KernelCall]:
        return {name: call for name, call in all_launches(self.traits) if self.only in name}


GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), GpuTraits(num_sms=108, shared_bytes=163 << 10)),
    # Of sm_80 with less shared memory, with which attention is launched as for none of the others.
    "sm_89": Gpu(GPUTarget("cuda", 89, 32), GpuTraits(142, 99 << 10, converts_fp8=True), only="attention_kernel"),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), GpuTraits(132, 227 << 10, converts_fp8=True)),
    # Where products of float32 may become TF32.
    "sm_100": Gpu(GPUTarget("cuda", 100, 32), GpuTraits(148, 227 << 10, converts_fp8=True), only="torch.float32"),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), GpuTraits(num_sms=304, shared_bytes=64 << 10)),
}
LEAST_SHARED_BYTES = min(gpu.traits.shared_bytes for gpu in GPUS.values())
LAUNCHES = [(gpu, name) for gpu in GPUS for name in GPUS[gpu].launches()]


def type_name(value: Argument) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return f"*{_TYPE_NAMES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def is_divisible(value: Argument) -> bool:
    """Tells whether a launch would tell the compiler that 16 divides the value: addresses are multiples of it, and so
    are the strides of most models."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def compile_for(call: KernelCall, target: Any) -> Any:
    names: list[str] = call.kernel.arg_names
    free = {name: value for name, value in call.arguments.items() if name not in call.kernel.do_not_specialize}
    known = {name: value for name, value in free.items() if isinstance(value, int) and value == 1}
    constants = dict(call.constants) | known | {name: None for name, value in call.arguments.items() if value is None}
    signature = {name: type_name(value) for name, value in call.arguments.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name, value in free.items() if is_divisible(value)
    }
    source = ASTSource(
        fn=call.kernel,
        signature={name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": call.num_warps, "num_stages": call.num_stages}
    return triton.compile(source, target=target, options=options)


def stack_bytes(cubin: bytes, path: Path) -> int:
    """Returns how many bytes of a thread the compiler has found no registers for."""
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found.group(1))


@pytest.mark.parametrize(("gpu", "name"), LAUNCHES, ids=[" ".join(launch) for launch in LAUNCHES])
def test_compiles(gpu: str, name: str, tmp_path: Path) -> None:
    call = GPUS[gpu].launches()[name]
    compiled = compile_for(call, GPUS[gpu].target)
    assert compiled.asm["cubin" if gpu.startswith("sm") else "hsaco"]
    adapts = "attention_kernel" in name or "matmul_kernel" in name  # to the shared memory that there is
    assert compiled.metadata.shared <= (GPUS[gpu].traits.shared_bytes if adapts else LEAST_SHARED_BYTES)
    if gpu.startswith("sm"):
        a_little = 0 if gpu == "sm_90" else 32
        assert stack_bytes(compiled.asm["cubin"], tmp_path / "cubin") <= a_little, "registers spill"
        assert "torch.float32" not in name or "tf32" not in compiled.asm["ptx"], "products are rounded"


@pytest.mark.parametrize("gpu", ["sm_80", "sm_89", "sm_90"])
def test_fp8_is_decoded_by_instructions_where_there_are_any(gpu: str) -> None:
    launches = GPUS[gpu].launches().items()
    over_fp8 = [call for name, call in launches if "attention_kernel" in name and call.constants["FP8"]]
    assert over_fp8
    for call in over_fp8:
        ptx = compile_for(call, GPUS[gpu].target).asm["ptx"]
        assert ("cvt.rn.f16x2.e4m3x2" in ptx) == GPUS[gpu].traits.converts_fp8


@pytest.mark.parametrize("name", [name for name in GPUS["sm_90"].launches() if "write_kv_kernel" in name])
def test_scales_are_inverted_as_on_a_cpu(name: str) -> None:
    """The interpreter divides exactly in any case; a GPU's fast division would give some values another code."""
    compiled = compile_for(GPUS["sm_90"].launches()[name], GPUS["sm_90"].target)
    assert "div.full" not in compiled.asm["ptx"]


def test_no_kernel_is_forgotten() -> None:
    launched = {call.kernel.__name__ for call in GPUS["sm_90"].launches().values()}
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(paged_kernels.gpu.device.__path__, "paged_kernels.gpu.device.")
    ]
    found = {
        name for module in modules for name, value in vars(module).items() if isinstance(value, triton.JITFunction)
    }
    assert {name for name in found if name.endswith("_kernel")} == launched
