"""A node between its engine, its connector and its service: the order of its work when a step has ended."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import BlockHash, block_hashes
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.engine.engine import Engine
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.step_result import Reservation, StepResult
from tests.node.fake_node import BLOCK_SIZE, NAMESPACE, FailingRunner, make_node


class NotingConnector(InProcessConnector):
    def __init__(self, order: list[str]) -> None:
        super().__init__(InProcessHub())
        self._order = order

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        self._order.append("published")
        await super().publish(blocks)


async def test_a_result_that_cannot_be_handled_ends_the_node_before_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Tokens of the first are lost: those of the next would follow a gap, and what the first has pinned stays so."""
    node = make_node()
    handled: list[StepResult] = []

    def on_result(result: StepResult) -> None:
        if result.outputs:
            handled.append(result)
            raise MemoryError

    node.start(on_result)
    request = EngineRequest("a", tuple(range(BLOCK_SIZE)), SamplingParams(max_tokens=9, temperature=0.0, seed=0))
    node.engine_thread.post(lambda engine: engine.add(request))
    async with asyncio.timeout(10.0):
        await node.crashed.wait()
        while (await node.engine_thread.call(lambda engine: engine.load())).num_requests_running:
            pass
    assert len(handled) == 1
    assert "the result of a step could not be handled" in caplog.text and "MemoryError" in caplog.text
    await node.close()


async def test_tokens_are_sent_before_watchers_and_the_publisher_run() -> None:
    order: list[str] = []
    node = make_node(connector=NotingConnector(order))
    sampled = asyncio.Event()

    def on_result(result: StepResult) -> None:
        if result.outputs:
            sampled.set()

    async def send_tokens() -> None:
        await sampled.wait()
        order.append("sent")

    async def watch() -> None:
        version = 0
        while not node.event_log.since(0).stored:
            version = await node.event_log.changed(version)
        order.append("watched")

    tasks = [asyncio.create_task(watch()), asyncio.create_task(send_tokens())]
    await asyncio.sleep(0)
    node.start(on_result)
    request = EngineRequest("a", tuple(range(2 * BLOCK_SIZE)), SamplingParams(max_tokens=1, temperature=0.0, seed=0))
    await node.engine_thread.call(lambda engine: engine.add(request))
    async with asyncio.timeout(10.0):
        await asyncio.gather(*tasks)
    await node.check_idle()
    await node.close()
    assert node._prefill_rate.seconds(1) is not None, "by which a store is judged"
    assert order[0] == "sent"
    assert sorted(order) == ["published", "sent", "watched"]


async def test_idle_is_looked_for_when_what_earlier_messages_have_named_is_published() -> None:
    node = make_node()
    reservations: asyncio.Queue[Reservation] = asyncio.Queue()

    def on_result(result: StepResult) -> None:
        for reservation in result.reservations:
            reservations.put_nowait(reservation)

    node.start(on_result)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    request = EngineRequest("a", tuple(range(2 * BLOCK_SIZE)), sampling, role=KVRole.CONSUME, receive=True)
    await node.engine_thread.call(lambda engine: engine.add(request))
    missing = [block.block_id for block in (await asyncio.wait_for(reservations.get(), 10.0)).missing]
    gate = threading.Event()

    def wait(engine: Engine) -> None:
        assert gate.wait(10.0)

    node.engine_thread.post(wait)  # so that the thread takes all of the following in one turn
    node.engine_thread.post(lambda engine: engine.deliver("a", len(missing)))  # names the blocks
    node.engine_thread.post(lambda engine: engine.unpin(missing))
    node.engine_thread.post(lambda engine: engine.abort("a"))
    check = asyncio.create_task(node.check_idle())
    await asyncio.sleep(0)
    gate.set()
    await check
    await node.close()


class LateStore(InProcessConnector):
    """A connector with a store behind it, which has what was published when `stored` is set."""

    def __init__(self) -> None:
        super().__init__(InProcessHub())
        self.num_published = 0
        self.num_offered: int | None = None  # when `finish_storing` was called
        self.stored = asyncio.Event()

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        await super().publish(blocks)
        self.num_published += len(blocks)

    async def finish_storing(self) -> None:
        self.num_offered = self.num_published
        await self.stored.wait()


async def test_a_node_has_drained_when_its_store_has_what_its_last_step_has_named() -> None:
    """Otherwise the newest conversations are lost with each restart."""
    connector = LateStore()
    node = make_node(connector=connector)
    sampled = asyncio.Event()
    node.start(lambda result: sampled.set() if result.outputs else None)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    request = EngineRequest("a", tuple(range(2 * BLOCK_SIZE)), sampling)
    await node.engine_thread.call(lambda engine: engine.add(request))
    async with asyncio.timeout(10.0):
        await sampled.wait()
        draining = asyncio.create_task(node.drain())
        while connector.num_offered is None:
            assert not draining.done()
            await asyncio.sleep(0)
        assert connector.num_offered == 2 and not draining.done()
        connector.stored.set()
        await draining
    await node.close()


async def test_a_node_whose_engine_has_ended_drains_all_the_same() -> None:
    node = make_node()
    node.start(lambda result: None)
    await node.engine_thread.stop(10.0)
    async with asyncio.timeout(10.0):
        await node.drain()
    await node.close()


class SlowStore(InProcessConnector):
    """A connector that publishes once `gate` is set, and takes a turn of the loop to forget blocks."""

    def __init__(self) -> None:
        super().__init__(InProcessHub())
        self.gate = asyncio.Event()
        self.forgotten: list[BlockHash] = []

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        await self.gate.wait()
        await super().publish(blocks)

    async def discard(self, names: Sequence[BlockHash]) -> None:
        await asyncio.sleep(0)
        self.forgotten += names


async def test_all_is_published_when_the_store_has_forgotten_blocks_that_were_distrusted_while_published() -> None:
    """Otherwise whoever computes the prompt next would find them there."""
    connector, sampled = SlowStore(), asyncio.Event()
    node = make_node(connector=connector)
    node.start(lambda result: sampled.set() if result.outputs else None)
    prompt = tuple(range(2 * BLOCK_SIZE))
    names = list(block_hashes(NAMESPACE.root(), prompt, BLOCK_SIZE))
    request = EngineRequest("a", prompt, SamplingParams(max_tokens=1, temperature=0.0, seed=0))
    await node.engine_thread.call(lambda engine: engine.add(request))
    async with asyncio.timeout(10.0):
        await sampled.wait()
        node.distrust(names[0])
        publishing = asyncio.create_task(node.all_published())
        for _ in range(4):  # more often than `publishing` asks the engine before it waits for the publisher
            await node.engine_thread.call(lambda engine: None)
        connector.gate.set()
        await publishing
    assert sorted(connector.forgotten) == sorted(names)
    await node.close()


async def test_the_log_names_a_request_that_a_step_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    node = make_node(FailingRunner())
    failed = asyncio.Event()
    node.start(lambda result: failed.set() if result.failures else None)
    request = EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=1, temperature=0.0, seed=0))
    await node.engine_thread.call(lambda engine: engine.add(request))
    async with asyncio.timeout(10.0):
        await failed.wait()
    await node.check_idle()
    await node.close()
    assert "request a failed: the logits are not finite" in caplog.text
