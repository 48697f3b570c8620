"""Silence ends a wait; the delays of a loop that was held up do not."""

import asyncio
import time

import pytest

from router.nodes.silence import Silence

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
