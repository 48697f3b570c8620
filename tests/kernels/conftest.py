"""Every compiled path of the machine, one after the other; what a test changes in the process is put back."""

from collections.abc import Iterator

import pytest
import torch
from paged_kernels import _native
from paged_kernels.cpu.threads import threads_kept, use_threads


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="package")
def all_threads_compute() -> Iterator[None]:
    """Has all threads compute, however little there is to do."""
    _native.start_together(True)
    yield
    _native.start_together(False)


@pytest.fixture(params=_native.available_instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.instruction_set()
    name: str = request.param
    _native.set_instruction_set(name)
    yield name
    _native.set_instruction_set(before)


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    count: int = request.param
    with threads_kept():
        use_threads(count)
        yield count


@pytest.fixture(
    params=[torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    value: torch.dtype = request.param
    return value
