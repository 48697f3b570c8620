"""Long work that leaves the event loop to others."""

import asyncio
from collections import Counter

from kvrelay.core.turns import ITEMS_AT_A_TIME, AFewPerTurn, OneAtATime, in_turns
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


async def test_a_few_of_those_that_come_together_go_on_in_a_turn_in_their_order() -> None:
    others = AFewPerTurn(3)
    async with counting_turns() as num_turns:
        await others.turn()
        assert num_turns() == 0, "nothing is to wait for"
        went_on: list[tuple[int, int]] = []

        async def go(number: int) -> None:
            await others.turn()
            went_on.append((num_turns(), number))

        tasks = [asyncio.create_task(go(number)) for number in range(20)]
        await asyncio.sleep(0)
        tasks[7].cancel()
        await asyncio.wait(tasks)
    assert [number for _, number in went_on] == [*range(7), *range(8, 20)]
    per_turn = Counter(turn for turn, _ in went_on)
    assert max(per_turn.values()) == 3 and len(per_turn) <= 8
    async with counting_turns() as num_turns:
        for _ in range(3):
            await others.turn()
        assert num_turns() == 0, "it is as at first"
