"""A node that drains exits when everything that began there has ended."""

import asyncio

from kvrelay.node.activity import Activity


async def test_idle_waits_for_everything_that_began() -> None:
    activity = Activity()
    await asyncio.wait_for(activity.idle(), 5)
    for name in ("a", "b", "b"):
        activity.begin(name)
    waiting = asyncio.ensure_future(activity.idle())
    for name in ("b", "b", "unknown"):
        activity.end(name)
        await asyncio.sleep(0)
        assert not waiting.done() and len(activity) == 1
    activity.end("a")
    await asyncio.wait_for(waiting, 5)
    assert not activity
