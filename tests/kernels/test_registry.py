"""Backends by name, with and without the compiled extension."""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Literal

import pytest
import torch
from paged_kernels import _native, fused, fused_reference
from paged_kernels.cpu import native
from paged_kernels.cpu.extension import load_extension
from paged_kernels.registry import BackendUnavailableError, select_backend


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after an installation without a compiler."""
    monkeypatch.setitem(sys.modules, "paged_kernels._native", None)
    load_extension.cache_clear()
    yield
    load_extension.cache_clear()


@pytest.mark.parametrize(("name", "expected"), [("auto", "native"), ("native", "native"), ("reference", "reference")])
def test_by_name(name: Literal["auto", "native", "reference"], expected: str) -> None:
    assert select_backend(name).name == expected


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_a_gpu_takes_triton(name: Literal["auto", "triton"]) -> None:
    assert select_backend(name, torch.device("cuda")).name == "triton"


def test_backends_of_another_device() -> None:
    with pytest.raises(BackendUnavailableError, match="need a CUDA or ROCm device, not cpu"):
        select_backend("triton")
    with pytest.raises(BackendUnavailableError, match="run on the CPU, not on cuda"):
        select_backend("native", torch.device("cuda"))


def test_triton_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match="install the package triton"):
        select_backend("auto", torch.device("cuda"))


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'cuda'"):
        select_backend("cuda")  # type: ignore[arg-type]


def test_auto_falls_back_with_one_warning(no_extension: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_backend("auto").name == "reference"
    (record,) = caplog.records
    message = record.getMessage()
    assert all(word in message for word in ("compiler", "g++", "Python headers", "python3-dev", "`pip install -v"))


def test_native_says_what_is_missing(no_extension: None) -> None:
    with pytest.raises(BackendUnavailableError, match="compiler"):
        select_backend("native")


@pytest.mark.parametrize(
    ("head_dim", "expected"), [(8, "native"), (20, "reference"), (256, "native"), (264, "reference")]
)
def test_auto_takes_the_kernels_that_take_the_heads(head_dim: int, expected: str) -> None:
    assert select_backend("auto", head_dim=head_dim).name == expected
    pool, slots = torch.zeros(1, 1, 1, 2, 8, head_dim), torch.zeros(1, dtype=torch.int64)
    row = torch.ones(1, 1, head_dim)
    with nullcontext() if expected == "native" else pytest.raises(ValueError, match="head_dim"):
        native.NativeBackend().write_kv(row, row, pool, 0, slots)


def test_native_says_which_heads_it_takes() -> None:
    with pytest.raises(BackendUnavailableError, match=r"heads of 8, 16, 24 \.\.\. 256, not 20"):
        select_backend("native", head_dim=20)


def test_fused_operations_fall_back(no_extension: None) -> None:
    x, weight = torch.randn(3, 16), torch.randn(16)
    assert torch.equal(fused.rms_norm(x, weight, 1e-5), fused_reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(fused.add_rms_norm(x, x, weight, 1e-5)[0], fused_reference.rms_norm(x + x, weight, 1e-5))
    assert torch.equal(fused.silu_mul(x), fused_reference.silu_mul(x))


def test_chooses_the_best_instruction_set() -> None:
    assert _native.instruction_set() == _native.available_instruction_sets()[0]
    with pytest.raises(ValueError, match="not available"):
        _native.set_instruction_set("avx1024")


def test_the_kernels_of_every_instruction_set_are_tested_here() -> None:
    """What the machine lacks is emulated, by a build with PAGED_EMULATE, as `make test` makes it."""
    found = {name.removesuffix("_emulated") for name in _native.available_instruction_sets()}
    with_avx2 = {"avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"}  # the others are emulated with it
    expected = {"portable"} | (with_avx2 if "avx2" in found else set())
    assert {"amx" if name == "amx_bf16" else name for name in found} == expected
