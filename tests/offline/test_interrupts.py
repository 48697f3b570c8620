"""Ctrl-C while a batch runs: it ends the batch, leaves nothing behind, and the next batch is right."""

import asyncio
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from kvrelay import LLM, SamplingParams
from kvrelay.engine.step_result import StepResult
from kvrelay.offline.interrupts import interrupts_held
from tests.demo_model import DEMO_MODEL

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["The capital of France is", "Water freezes at", "A week has"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(DEMO_MODEL, dtype="float32", threads=1, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=32)


@pytest.fixture(autouse=True)
def nothing_is_left_and_the_next_batch_is_right(llm: LLM) -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is handler
    llm._engine.check_idle()
    assert llm.generate(PROMPTS[0], GREEDY, progress=False)[0].outputs[0].text.startswith(" Paris")


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = llm._engine.step, iter(range(100))

    def interrupted() -> tuple[StepResult | None, bool]:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 4, GREEDY, progress=False)


def test_an_interrupted_batch_says_nothing_in_the_next_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come when a step is done and its result is not taken yet."""
    expected = llm.generate(PROMPTS[1], GREEDY, progress=False)

    def interrupted() -> StepResult | None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "_take_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[0], GREEDY, progress=False)
    assert llm.generate(PROMPTS[1], GREEDY, progress=False)[0].outputs == expected[0].outputs


def test_an_interrupt_waits_until_the_step_has_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of one, the blocks that the engine has just taken would be lost."""
    pool = llm._engine.pool
    allocate = pool.allocate

    def interrupted(count: int) -> list[int] | None:
        block_ids = allocate(count)
        signal.raise_signal(signal.SIGINT)
        return block_ids

    monkeypatch.setattr(pool, "allocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, progress=False)


def test_an_interrupt_in_the_last_step_is_not_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, num_steps = llm._engine.step, 0

    def interrupted() -> tuple[StepResult | None, bool]:
        nonlocal num_steps
        num_steps += 1
        signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([5], SamplingParams(max_tokens=1), progress=False)
    assert num_steps == 1


def test_a_program_that_handles_interrupts_itself_keeps_its_handler(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    step = llm._engine.step

    def interrupted() -> tuple[StepResult | None, bool]:
        signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm._engine, "step", interrupted)

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        assert llm.generate(PROMPTS[0], GREEDY, progress=False)
        assert signal.getsignal(signal.SIGINT) is handle
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(came) == {signal.SIGINT}


def test_a_programs_handler_is_called_for_every_interrupt() -> None:
    """That of asyncio raises at the second one only."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with interrupts_held():
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            assert not came
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGINT] * 2


def test_a_handler_that_raises_waits_until_the_step_has_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of asyncio raises KeyboardInterrupt at the second Ctrl-C."""
    pool = llm._engine.pool
    allocate = pool.allocate

    def interrupted(count: int) -> list[int] | None:
        block_ids = allocate(count)
        signal.raise_signal(signal.SIGINT)
        return block_ids

    async def program() -> None:
        llm.generate(PROMPTS, GREEDY, progress=False)

    monkeypatch.setattr(pool, "allocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(program())


@pytest.mark.parametrize("num_prompts", [1, 3], ids=["in a later step", "in the same step"])
def test_a_handler_may_put_another_in_its_place(num_prompts: int, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many programs ignore the first Ctrl-C, and let the second one end them. It, too, waits until the step has ended,
    and here each prompt's first block and its second bring one."""
    pool = llm._engine.pool
    allocate, num_came = pool.allocate, 0

    def second(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, second)

    def interrupted(count: int) -> list[int] | None:
        nonlocal num_came
        num_came += 1
        block_ids = allocate(count)
        signal.raise_signal(signal.SIGINT)
        return block_ids

    monkeypatch.setattr(pool, "allocate", interrupted)
    before = signal.signal(signal.SIGINT, first)
    try:
        with pytest.raises(TimeoutError):
            llm.generate(PROMPTS[:num_prompts], SamplingParams(max_tokens=32, ignore_eos=True), progress=False)
        assert signal.getsignal(signal.SIGINT) is second
    finally:
        signal.signal(signal.SIGINT, before)
    assert num_came == max(2, num_prompts)


def test_a_handler_may_have_the_next_interrupt_end_the_process(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm._engine.step
    in_place: list[object] = []

    def interrupted() -> tuple[StepResult | None, bool]:
        in_place.append(signal.getsignal(signal.SIGINT))
        if len(in_place) == 1:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm._engine, "step", interrupted)
    before = signal.signal(signal.SIGINT, lambda number, frame: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        assert llm.generate(PROMPTS[0], GREEDY, progress=False)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(in_place[1:]) == {signal.SIG_DFL}
