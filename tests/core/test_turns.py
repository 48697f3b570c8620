"""Long work that leaves the event loop to others."""

import asyncio

from kvrelay.core.turns import ITEMS_AT_A_TIME, OneAtATime, in_turns
from tests.loop_turns import counting_turns


async def test_the_loop_turns_while_many_items_are_converted() -> None:
    items = range(20 * ITEMS_AT_A_TIME + 1)
    async with counting_turns() as num_turns:
        assert await in_turns(str, items) == list(map(str, items))
        assert num_turns() >= 20
    assert await in_turns(str, []) == []


async def test_each_of_those_that_come_together_has_a_turn_of_its_own() -> None:
    others = OneAtATime()
    async with counting_turns() as num_turns:

        async def go() -> int:
            await others.turn()
            return num_turns()

        assert len(set(await asyncio.gather(*(go() for _ in range(5))))) == 5
