"""The engine's thread from outside: every call gets an answer, even if the engine has ended."""

import asyncio
import threading
from dataclasses import replace

import pytest
from paged_kernels.cpu.threads import threads_kept

from kvrelay.core.errors import UnavailableError
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.process.core_table import CoreShare
from kvrelay.engine import engine_thread
from kvrelay.engine.cpu.step_threads import StepThreads
from kvrelay.engine.engine import Engine
from kvrelay.engine.engine_thread import EngineThread, should_yield_cores
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.runner import LaunchedStep, Runner
from kvrelay.engine.step_result import PromptOutput, RequestFailure, Reservation, SequenceOutput, StepResult
from tests.engine.harness import Harness, prompt_of, request

PATIENCE = 10.0


def make(crashed: asyncio.Event) -> EngineThread:
    loop = asyncio.get_running_loop()
    engine = Harness().engine
    return EngineThread(engine, loop, on_result=lambda result: None, on_crash=lambda error: crashed.set())


async def test_calls_behind_a_crash_fail_instead_of_waiting_for_ever() -> None:
    crashed, gate = asyncio.Event(), threading.Event()
    thread = make(crashed)
    thread.start()

    def crash(engine: Engine) -> None:
        assert gate.wait(PATIENCE)
        raise RuntimeError("as a fault of ours would")

    thread.post(crash)
    waiting = thread.call(lambda engine: engine.load())
    gate.set()
    async with asyncio.timeout(PATIENCE):
        await crashed.wait()
        with pytest.raises(UnavailableError):
            await waiting
        with pytest.raises(UnavailableError):
            await thread.call(lambda engine: engine.load())


async def test_calls_behind_a_stop_fail_too() -> None:
    thread = make(asyncio.Event())
    thread.start()
    async with asyncio.timeout(PATIENCE):
        assert (await thread.call(lambda engine: engine.load())).num_blocks == 64
        stopping = asyncio.create_task(thread.stop(PATIENCE))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            await thread.call(lambda engine: engine.load())
        await stopping


async def test_a_stop_does_not_overtake_the_calls_before_it() -> None:
    """Though it finds both in the mailbox."""
    thread, gate = make(asyncio.Event()), threading.Event()
    thread.start()

    def hold(engine: Engine) -> None:
        assert gate.wait(PATIENCE)

    thread.post(hold)
    before = thread.call(lambda engine: engine.load())
    async with asyncio.timeout(PATIENCE):
        stopping = asyncio.create_task(thread.stop(PATIENCE))
        await asyncio.sleep(0)
        gate.set()
        assert (await before).num_blocks == 64
        await stopping


async def test_what_a_call_raises_reaches_its_caller_and_the_engine_goes_on() -> None:
    thread = make(asyncio.Event())
    thread.start()

    def fail(engine: Engine) -> None:
        raise RuntimeError("as a fault of ours would")

    async with asyncio.timeout(PATIENCE):
        with pytest.raises(RuntimeError, match="as a fault of ours would"):
            await thread.call(fail)
        assert (await thread.call(lambda engine: engine.load())).num_blocks == 64
        await thread.stop(PATIENCE)


async def test_an_engine_with_nothing_to_do_waits_for_messages() -> None:
    """Otherwise an idle node would take a core from its neighbours."""
    loop, thread = asyncio.get_running_loop(), make(asyncio.Event())
    thread.start()
    begun = loop.time()
    async with asyncio.timeout(PATIENCE):
        for _ in range(100):
            await thread.call(lambda engine: None)
        assert thread.num_turns <= 101 + (loop.time() - begun) / engine_thread._IDLE_WAIT_SECONDS
        await thread.stop(PATIENCE)


async def test_an_answer_never_overtakes_the_results_before_it() -> None:
    """A step's result waits for the layers of the next step, but an answer in between is preceded by it."""
    harness, crashes = Harness(), list[BaseException]()
    num_told = 0

    def on_result(result: StepResult) -> None:
        nonlocal num_told
        num_told += len(result.outputs)

    thread = EngineThread(harness.engine, asyncio.get_running_loop(), on_result=on_result, on_crash=crashes.append)
    thread.start()
    async with asyncio.timeout(PATIENCE):
        await thread.call(lambda engine: engine.add(request("a", prompt_of(5), 50)))
        while num_told < 50:
            num_made = await thread.call(lambda engine: engine.load().num_steps)
            assert num_told >= num_made
        await thread.stop(PATIENCE)
    assert not crashes


async def test_an_answer_does_not_overtake_the_last_result_though_the_next_step_takes_long() -> None:
    held: list[HeldAt] = []

    def hold(inner: Runner) -> HeldAt:
        held.append(HeldAt(inner, (2, 3)))
        return held[0]

    harness, crashes, results = Harness(wrap=hold), list[BaseException](), list[StepResult]()
    thread = EngineThread(harness.engine, asyncio.get_running_loop(), on_result=results.append, on_crash=crashes.append)
    thread.start()
    async with asyncio.timeout(PATIENCE):
        await thread.call(lambda engine: engine.add(request("a", prompt_of(5), 5)))
        [(at_second, on_from_second), (_, on_from_third)] = held[0].gates.values()
        await asyncio.to_thread(at_second.wait, PATIENCE)
        answer = thread.call(lambda engine: engine.load().num_steps)
        on_from_second.set()
        assert await answer == 2
        assert sum(len(result.outputs) for result in results) == 2
        on_from_third.set()
        await thread.stop(PATIENCE)
    assert not crashes


async def test_an_engine_with_nothing_to_do_tells_at_once_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode node hears that there is room for a request, although nothing is computed."""
    monkeypatch.setattr(engine_thread, "_IDLE_WAIT_SECONDS", 3600.0)
    admitted = asyncio.Event()

    def on_result(result: StepResult) -> None:
        if result.reservations:
            admitted.set()

    thread = EngineThread(
        Harness().engine, asyncio.get_running_loop(), on_result=on_result, on_crash=lambda error: None
    )
    thread.start()
    async with asyncio.timeout(PATIENCE):
        thread.post(lambda engine: engine.add(request("a", prompt_of(5), role=KVRole.CONSUME)))
        await admitted.wait()
        await thread.stop(PATIENCE)


async def test_a_stop_is_not_missed_while_the_cores_are_left_to_a_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "_FIRST_TOKEN_SECONDS", 3600.0)
    begun = asyncio.Event()
    with threads_kept():
        harness = Harness(threads=StepThreads(CoreShare(2)))
        thread = EngineThread(
            harness.engine,
            asyncio.get_running_loop(),
            on_result=lambda result: begun.set(),
            on_crash=lambda error: None,
        )
        harness.engine.add(request("a", prompt_of(5), 400))
        thread.start()
        async with asyncio.timeout(PATIENCE):
            await begun.wait()
            await thread.stop(PATIENCE / 2)
    assert not thread.is_alive


@pytest.mark.parametrize("fails", [False, True])
async def test_an_answer_that_nobody_waits_for_any_more_is_dropped(fails: bool) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    thread = make(asyncio.Event())

    def answer(engine: Engine) -> None:
        if fails:
            raise ValueError

    call = thread.call(answer)
    call.cancel()
    thread.start()
    async with asyncio.timeout(PATIENCE):
        await thread.call(lambda engine: None)  # is answered after it
        await thread.stop(PATIENCE)
    assert not errors


async def test_a_message_that_follows_from_another_waits_for_a_step() -> None:
    """However fast the loop answers, it has been told before what the first message changed; steps do not starve."""
    thread = make(asyncio.Event())
    thread.start()
    turns: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def note_turn(engine: Engine) -> None:
        loop.call_soon_threadsafe(turns.put_nowait, thread.num_turns)

    def first(engine: Engine) -> None:
        note_turn(engine)
        thread.post(note_turn)  # as the loop does when it gets an answer while the thread still runs messages

    async with asyncio.timeout(PATIENCE):
        thread.post(first)
        turn = await turns.get()
        assert await turns.get() == turn + 1
        await thread.stop(PATIENCE)


class HeldAt:
    """A runner around `inner` whose steps with these numbers wait until they are released."""

    def __init__(self, inner: Runner, numbers: tuple[int, ...]) -> None:
        self._inner = inner
        self._num_steps = 0
        self.gates = {number: (threading.Event(), threading.Event()) for number in numbers}  # reached, go on

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        self._num_steps += 1
        if self._num_steps in self.gates:
            reached, go_on = self.gates[self._num_steps]
            reached.set()
            assert go_on.wait(PATIENCE)
        return self._inner.launch(plan)


async def test_further_tokens_wait_for_the_last_one() -> None:
    """No interval ends before the last one; the first one does not wait."""
    held: list[HeldAt] = []

    def hold(inner: Runner) -> HeldAt:
        held.append(HeldAt(inner, (2, 10)))
        return held[0]

    harness, first, last = Harness(wrap=hold), asyncio.Event(), asyncio.Event()
    num_told = 0

    def on_result(result: StepResult) -> None:
        nonlocal num_told
        num_told += len(result.outputs)
        first.set()
        if num_told == 20:
            last.set()

    thread = EngineThread(
        harness.engine,
        asyncio.get_running_loop(),
        on_result=on_result,
        on_crash=lambda error: pytest.fail(str(error)),
        stream_interval=3600.0,
    )
    thread.start()
    async with asyncio.timeout(PATIENCE):
        await thread.call(lambda engine: engine.add(request("a", prompt_of(5), 20)))
        await first.wait()
        [(_, at_second), (tenth_reached, at_tenth)] = held[0].gates.values()
        at_second.set()
        await asyncio.to_thread(tenth_reached.wait, PATIENCE)
        assert num_told == 1
        at_tenth.set()
        await last.wait()
        await thread.stop(PATIENCE)


class BrokenAtThird:
    """A runner around `inner` whose third step ends the engine before its layers begin."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._num_steps = 0

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        self._num_steps += 1
        if self._num_steps == 3:
            raise RuntimeError("as a fault of ours would")
        return self._inner.launch(plan)


async def test_before_a_crash_every_result_is_told() -> None:
    """So is the result of the last step, which waits for the layers of a step that never gets so far."""
    harness, crashed = Harness(wrap=BrokenAtThird), asyncio.Event()
    results: list[StepResult] = []
    told_at_crash: list[int] = []

    def on_crash(error: BaseException) -> None:
        told_at_crash.append(sum(len(result.outputs) for result in results))
        crashed.set()

    thread = EngineThread(harness.engine, asyncio.get_running_loop(), on_result=results.append, on_crash=on_crash)
    thread.start()
    async with asyncio.timeout(PATIENCE):
        await thread.call(lambda engine: engine.add(request("a", prompt_of(5), 50)))
        await crashed.wait()
        await thread.stop(PATIENCE)
    assert told_at_crash == [2]


async def test_a_stopped_thread_leaves_no_step_in_flight() -> None:
    """The memory of the step may be gone next."""
    harness, started = Harness(run_ahead=True), asyncio.Event()

    def on_result(result: StepResult) -> None:
        if result.outputs:
            started.set()

    thread = EngineThread(
        harness.engine, asyncio.get_running_loop(), on_result=on_result, on_crash=lambda error: started.set()
    )
    thread.start()
    async with asyncio.timeout(PATIENCE):
        await thread.call(lambda engine: engine.add(request("a", prompt_of(5), 400)))
        await started.wait()
        await thread.stop(PATIENCE)
    assert harness.late.num_ahead > 0
    assert not harness.late.in_flight


@pytest.mark.parametrize(
    ("requests", "gives"),
    [
        ([request("a", prompt_of(5), 3)], True),
        ([request("a", prompt_of(5), 1)], False),  # over with its first token
        ([request("a", prompt_of(5), 3, role=KVRole.PRODUCE)], False),
        ([request("a", prompt_of(5), 3), request("b", prompt_of(5), 3)], False),
    ],
)
@pytest.mark.parametrize("num_cores", [1, 2])
def test_only_a_request_that_is_alone_and_goes_on_leaves_the_cores_to_its_first_token(
    requests: list[EngineRequest], gives: bool, num_cores: int
) -> None:
    with threads_kept():
        harness = Harness(threads=StepThreads(CoreShare(num_cores)))
        for one in requests:
            harness.engine.add(one)
        while not any(result.prompts for result in harness.results):
            harness.step()
        assert should_yield_cores(harness.engine, harness.results[-1]) == (gives and num_cores > 1)


def test_only_further_tokens_of_outputs_that_go_on_can_wait() -> None:
    load = Harness().engine.load()
    nothing = StepResult((), (), (), (), (), (), (), (), (), load)
    goes_on = SequenceOutput("a", TokenOutput(0, (5,)))
    ends = SequenceOutput("b", TokenOutput(0, (5,), finish_reason=FinishReason.LENGTH))
    assert nothing.can_wait
    assert replace(nothing, outputs=(goes_on,), stored=(BlockHash(bytes(32)),)).can_wait
    for urgent in (
        replace(nothing, outputs=(goes_on, ends)),
        replace(nothing, outputs=(goes_on,), prompts=(PromptOutput("c", 0, PromptLogprobs()),)),
        replace(nothing, reservations=(Reservation("c", 0, ()),)),
        replace(nothing, failures=(RequestFailure("c", "why"),)),
        replace(nothing, progress=(("c", 1),)),
    ):
        assert not urgent.can_wait
