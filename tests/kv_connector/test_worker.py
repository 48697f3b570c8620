"""A thread for copies: nothing runs on it any more when its caller goes on."""

import asyncio
import threading

from kv_connector.worker import Worker


async def test_a_cancelled_caller_waits_for_the_thread() -> None:
    worker = Worker("kv-test")
    started, release, finished = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        started.set()
        release.wait(10)
        finished.set()

    task = asyncio.create_task(worker.run(copy))
    await asyncio.to_thread(started.wait, 10)
    queued = asyncio.create_task(worker.run(finished.clear))
    await asyncio.sleep(0)
    queued.cancel()
    await asyncio.wait([queued])  # had not started, so it is over at once and never runs
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    release.set()
    await asyncio.wait([task])
    assert task.cancelled() and finished.is_set()
    worker.stop()
    assert finished.is_set()
