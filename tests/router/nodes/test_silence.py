"""Silence ends a wait; the delays of a loop that was held up do not."""

import asyncio
import time
from typing import Any

import pytest

from router.nodes.silence import Silence
from tests.simulation.virtual_loop import VirtualLoop

PATIENCE = 10.0


async def test_silence_beyond_the_limit_raises() -> None:
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(TimeoutError):
            async with Silence(0.05):
                await asyncio.Event().wait()


async def test_a_stream_with_messages_is_waited_for() -> None:
    async with Silence(0.4) as silence:
        for _ in range(60):
            await asyncio.sleep(0.01)
            silence.broken()


async def test_a_loop_that_was_held_up_blames_nobody() -> None:
    """After SIGSTOP and SIGCONT of this process, messages that came meanwhile are read before the next tick."""
    async with Silence(0.2) as silence:
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        for _ in range(3):
            await asyncio.sleep(0)  # timers that were due run now
        silence.broken()


def test_the_limit_is_kept_to_the_tick_and_no_timer_is_left() -> None:
    async def main() -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        failures: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda loop, context: failures.append(context))
        async with Silence(10.0):
            await asyncio.sleep(9.9)
        await asyncio.sleep(100.0)  # for timers that were left
        began = loop.time()
        with pytest.raises(TimeoutError):
            async with Silence(10.0) as silence:
                await asyncio.sleep(9.9)
                silence.broken()
                await asyncio.sleep(1000.0)
        assert loop.time() - began == pytest.approx(19.0, abs=1.0)
        return failures

    loop = VirtualLoop()
    try:
        assert loop.run_until_complete(main()) == []
    finally:
        loop.close()
