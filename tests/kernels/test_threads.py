"""The team of threads that kernels compute on, through the kernels."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from paged_kernels._native import ThreadLimit, start_together
from paged_kernels.cpu import packed
from paged_kernels.cpu.packed import PackedWeight
from paged_kernels.cpu.threads import num_threads, remember_threads, threads_kept, use_threads
from torch import Tensor

from tests.kernel_helpers import helper_seconds, helpers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of /proc")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    with threads_kept():
        yield


@pytest.fixture(scope="module")
def weight() -> PackedWeight:
    """Makes a weight of so many outputs that several threads get a span of them."""
    return packed.pack(torch.randn(6000, 256).bfloat16())


def product(weight: PackedWeight, x: Tensor, count: int) -> Tensor:
    use_threads(count)
    return packed.linear(x, weight)


def test_a_thread_has_torchs_number_until_it_is_told_another() -> None:
    torch.set_num_threads(3)
    assert num_threads() == 3
    use_threads(2)
    assert (num_threads(), torch.get_num_threads()) == (2, 1)
    use_threads(2, torch_multiplies=True)
    assert (num_threads(), torch.get_num_threads()) == (2, 2)


def test_numbers_are_put_back() -> None:
    torch.set_num_threads(2)
    with threads_kept():
        use_threads(5, torch_multiplies=True)
        assert num_threads() == torch.get_num_threads() == 5
    assert num_threads() == torch.get_num_threads() == 2


def test_what_one_thread_is_told_is_not_anothers() -> None:
    """Though torch gives its number to every thread that is new to it."""
    torch.set_num_threads(3)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        back = first.submit(remember_threads).result()
        first.submit(use_threads, 2).result()
        assert second.submit(num_threads).result() == num_threads() == 3
        back_too = second.submit(remember_threads).result()
        second.submit(use_threads, 5).result()
        for pool, put_back in ((first, back), (second, back_too)):
            pool.submit(put_back).result()
            assert pool.submit(torch.get_num_threads).result() == 3
    with ThreadPoolExecutor(1) as third:
        assert third.submit(torch.get_num_threads).result() == 3


def test_helpers_compute(weight: PackedWeight) -> None:
    x = torch.randn(512, 256).bfloat16()
    product(weight, x, 2)
    before, own_before = helper_seconds(), time.thread_time()
    for _ in range(20):
        product(weight, x, 2)
    assert helper_seconds() - before > 0.1 * (time.thread_time() - own_before)


def test_helpers_are_started_once(weight: PackedWeight) -> None:
    x = torch.randn(3, 256).bfloat16()
    alone = product(weight, x, 1)
    for count in (4, 2, 4):
        assert torch.equal(product(weight, x, count), alone)
    before = len(helpers())
    assert before >= 3
    for count in (4, 3, 2, 4):
        product(weight, x, count)
    assert len(helpers()) == before


@pytest.mark.parametrize("together", [True, False])
def test_many_short_calls(weight: PackedWeight, together: bool) -> None:
    """Helpers come early, late and not at all, and fall asleep in between."""
    start_together(together)
    try:
        x = torch.randn(2, 256).bfloat16()
        alone = product(weight, x, 1)
        use_threads(3)
        assert all(torch.equal(packed.linear(x, weight), alone) for _ in range(3000))
    finally:
        start_together(True)


@pytest.fixture
def limit() -> Iterator[memoryview]:
    """Makes the word that limits the threads of all calls of a test."""
    word = memoryview(bytearray(2)).cast("H")
    word[0] = 1
    applied = ThreadLimit(word)
    applied.begin()
    yield word
    applied.end()


def test_a_limit_keeps_helpers_away_and_lets_them_come(weight: PackedWeight, limit: memoryview) -> None:
    x = torch.randn(512, 256).bfloat16()
    seconds = []
    for limit[0] in (1, 3, 1, 3):
        before = helper_seconds()
        for _ in range(10):
            product(weight, x, 3)
        seconds.append(helper_seconds() - before)
    assert max(seconds[0], seconds[2]) < 0.1 * min(seconds[1], seconds[3])


def test_helpers_come_and_go_within_a_call(weight: PackedWeight, limit: memoryview) -> None:
    """Each value is there for less time than a call takes."""
    start_together(False)
    try:
        x = torch.randn(2048, 256).bfloat16()
        alone = product(weight, x, 1)

        def computes() -> bool:
            with threads_kept():
                return all(torch.equal(product(weight, x, 4), alone) for _ in range(30))

        before = helper_seconds()
        with ThreadPoolExecutor(1) as pool:
            computed = pool.submit(computes)
            changes = 0
            while not computed.done():
                limit[0] = (3, 1, 0, 4, 2)[changes % 5]
                changes += 1
                time.sleep(0.0005)
            assert computed.result()
        assert changes > 30
        assert helper_seconds() > before
    finally:
        start_together(True)


def test_a_limit_is_two_bytes() -> None:
    with pytest.raises(ValueError, match="two bytes"):
        ThreadLimit(memoryview(bytearray(4)))
    with pytest.raises((TypeError, BufferError)):
        ThreadLimit(3)  # type: ignore[arg-type]


def test_callers_that_come_together(weight: PackedWeight) -> None:
    """One has the team, the others compute alone."""
    x = torch.randn(4, 256).bfloat16()
    alone = product(weight, x, 1)

    def computes(_: int) -> bool:
        with threads_kept():
            use_threads(2)
            return all(torch.equal(packed.linear(x, weight), alone) for _ in range(300))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(computes, range(4)))


_FORKS = """
import os, torch
from paged_kernels.cpu import packed
from paged_kernels._native import start_together
from paged_kernels.cpu.threads import use_threads

start_together(True)
weight, x = packed.pack(torch.randn(6000, 256).bfloat16()), torch.randn(3, 256).bfloat16()
use_threads(2)
before = packed.linear(x, weight)
child = os.fork()
if child == 0:
    start_together(True)
    os._exit(0 if torch.equal(packed.linear(x, weight), before) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(packed.linear(x, weight), before)
"""


def test_a_forked_process_has_a_team_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKS], check=True, timeout=60)
