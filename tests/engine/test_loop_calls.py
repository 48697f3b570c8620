"""Calls from a thread reach the loop in order, and none is lost. Those that can wait do, the others do not."""

import asyncio
import threading

from kvrelay.engine.loop_calls import LoopCalls

PATIENCE = 10.0
NEVER = 3600.0  # an interval that no test sees the end of


async def turns_of_the_loop() -> None:
    """Lets the loop run often enough for everything that is due."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_can_wait_waits_for_what_can_not() -> None:
    ran: list[str] = []
    calls = LoopCalls(asyncio.get_running_loop(), NEVER)
    calls.add(ran.append, "finds the loop at rest", can_wait=True)
    await turns_of_the_loop()
    assert ran == ["finds the loop at rest"]
    calls.add(ran.append, "waits", can_wait=True)
    await turns_of_the_loop()
    assert ran == ["finds the loop at rest"]
    calls.add(ran.append, "does not")
    await turns_of_the_loop()
    assert ran == ["finds the loop at rest", "waits", "does not"]


async def test_what_can_wait_waits_for_an_interval_at_most() -> None:
    ran = asyncio.Event()
    calls = LoopCalls(asyncio.get_running_loop(), 0.001)
    async with asyncio.timeout(PATIENCE):
        for _ in range(10):
            ran.clear()
            calls.add(ran.set, can_wait=True)
            await ran.wait()
        while calls._timer is not None:  # without calls there is no further interval, in which an idle loop would wake
            await asyncio.sleep(0)


async def test_without_an_interval_nothing_waits() -> None:
    ran: list[int] = []
    calls = LoopCalls(asyncio.get_running_loop(), 0.0)
    for number in range(3):
        calls.add(ran.append, number, can_wait=True)
        await turns_of_the_loop()
        assert ran == list(range(number + 1))


async def test_a_thread_that_never_rests_loses_no_call() -> None:
    """The thread adds calls at any moment, also while a turn takes calls or an interval ends."""
    num_calls = 20_000
    ran: list[int] = []
    all_ran = asyncio.Event()

    def run(number: int) -> None:
        ran.append(number)
        if number == num_calls - 1:
            all_ran.set()

    def add_all() -> None:
        for number in range(num_calls):
            calls.add(run, number, can_wait=number % 100 != 0 or number == num_calls - 1)

    calls = LoopCalls(asyncio.get_running_loop(), 0.001)
    thread = threading.Thread(target=add_all)
    thread.start()
    async with asyncio.timeout(PATIENCE):
        await all_ran.wait()
    thread.join(PATIENCE)
    assert ran == list(range(num_calls))


async def test_a_call_that_raises_takes_no_other_with_it() -> None:
    loop, errors, ran = asyncio.get_running_loop(), list[object](), list[str]()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    error = RuntimeError("as a fault of ours would")

    def fail() -> None:
        raise error

    calls = LoopCalls(loop, NEVER)
    calls.add(fail)
    calls.add(ran.append, "the next one")
    await turns_of_the_loop()
    assert (errors, ran) == ([error], ["the next one"])
