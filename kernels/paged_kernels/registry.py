"""Chooses the attention backend by name. Backends are imported only when chosen."""

import importlib.util
import logging
from typing import Literal

import torch

from paged_kernels.base import AttentionBackend
from paged_kernels.cpu.extension import load_extension
from paged_kernels.kv_scales import KVScales

_logger = logging.getLogger(__name__)

BackendName = Literal["auto", "native", "reference", "triton"]

_CPU = torch.device("cpu")

_NATIVE_HEAD_DIMS = range(8, 257, 8)  # as csrc/bindings/pool_view.h checks


class BackendUnavailableError(RuntimeError):
    """The attention backend that was asked for cannot be used; the message says what to do."""


def select_backend(
    name: BackendName,
    device: torch.device = _CPU,
    *,
    kv_scales: KVScales | None = None,
    head_dim: int | None = None,
) -> AttentionBackend:
    """Returns a backend by name, for a pool on `device` with heads of `head_dim`, None for those that every backend
    takes. `auto` takes Triton for a pool on a GPU, else the compiled kernels where they were built and take such heads,
    else, with a warning, plain torch. A float8_e4m3fn pool needs `kv_scales`.

    Raises BackendUnavailableError when `native` is asked for and was not built or does not take such heads, or one does
    not run on the device; ValueError for an unknown name.
    """
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _triton_backend(device, kv_scales)
    if name == "native" and device.type != "cpu":
        raise BackendUnavailableError(f"the native attention kernels run on the CPU, not on {device}: use auto")
    if name in ("auto", "native") and (problem := _problem_with_native(head_dim)) is not None:
        if name == "native":
            raise BackendUnavailableError(problem)
        _logger.warning("Attention is computed by plain torch, which is many times slower in decoding: %s.", problem)
        name = "reference"
    match name:
        case "auto" | "native":
            from paged_kernels.cpu.native import NativeBackend

            return NativeBackend(kv_scales)
        case "reference":
            from paged_kernels.reference import ReferenceBackend

            return ReferenceBackend(kv_scales)
        case _:
            raise ValueError(f"unknown attention backend {name!r}: use auto, native, reference or triton")


def _problem_with_native(head_dim: int | None) -> str | None:
    if load_extension() is None:
        return (
            "the compiled attention kernels (paged_kernels._native) are missing: building them failed, or there was no "
            "C++20 compiler or no Python headers (the packages g++ and python3-dev); reinstall kvrelay with `pip "
            "install -v ...` to see why"
        )
    if head_dim is not None and head_dim not in _NATIVE_HEAD_DIMS:
        return (
            f"the compiled attention kernels take heads of 8, 16, 24 ... 256, not {head_dim} (head_dim); only "
            "the attention backend reference does"
        )
    return None


def _triton_backend(device: torch.device, kv_scales: KVScales | None) -> AttentionBackend:
    if device.type != "cuda":
        raise BackendUnavailableError(
            f"the Triton attention kernels need a CUDA or ROCm device, not {device}: use auto"
        )
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailableError("the Triton attention kernels need triton: install the package triton")
    from paged_kernels.gpu.attention import TritonBackend

    return TritonBackend(kv_scales)
