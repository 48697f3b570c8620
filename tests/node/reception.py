"""The reception of a request's blocks at a node without a model, from holders that can fail."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from kv_connector.in_process import InProcessHub
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.node_report import FetchReport, RefusedBlock
from kvrelay.core.outages import Outages
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.step_result import Reservation, StepResult
from kvrelay.node.absences import Absences
from kvrelay.node.fetches_under_way import FetchesUnderWay
from kvrelay.node.node import Node
from kvrelay.node.receiver import Receiver, ReceptionContext
from tests.node.fake_node import BLOCK_SIZE, LAYOUT, make_node
from tests.node.holders import Holder, LadderConnector, content

PROMPT = tuple(range(100, 137))  # four full blocks and a partial one
NUM_BLOCKS = 5
PATIENCE = 10.0


@dataclass(slots=True)
class Reception:
    """A request that waits for all its blocks, and two holders, P and H, that have none of them yet."""

    node: Node
    connector: LadderConnector
    reservation: Reservation
    p: Holder
    h: Holder
    store: Holder
    receiver: Receiver
    missing: list[int] = field(default_factory=list)  # what the router was told
    refused: list[RefusedBlock] = field(default_factory=list)

    async def run(self) -> FetchReport:
        async with asyncio.timeout(PATIENCE):
            report = await self.receiver.run()
        computed = await self.num_computed()
        assert computed == self.reservation.num_cached_tokens + report.num_tokens, "what is reported was delivered"
        memory = self.connector._require().pool.buffer.memory
        num_blocks = sum(count for _, count in report.fetched)
        for index, block in enumerate(self.reservation.missing[:num_blocks]):
            start = block.block_id * LAYOUT.block_bytes
            assert bytes(memory[start : start + LAYOUT.block_bytes]) == content(index)
        return report

    async def num_computed(self) -> int:
        return await self.node.engine_thread.call(lambda engine: engine._sequences["r"][0].num_computed_tokens)

    async def told(self, *missing: int) -> None:
        """Returns when the router was told of these numbers of missing tokens."""
        async with asyncio.timeout(PATIENCE):
            while self.missing != list(missing):
                await asyncio.sleep(0)


@asynccontextmanager
async def reception(
    *,
    patience: float = PATIENCE,
    fetch_timeout: float = PATIENCE,
    absences: Absences | None = None,
    outages: Outages | None = None,
    time_left: float | None = None,
    num_here: int = 0,
) -> AsyncIterator[Reception]:
    """Makes a reception of the blocks behind the first `num_here`, which the node has computed before."""
    hub = InProcessHub()
    connector = LadderConnector(hub)
    reservations: asyncio.Queue[Reservation] = asyncio.Queue()
    over = asyncio.Event()  # `before` is

    def on_result(result: StepResult) -> None:
        if result.outputs:
            over.set()
        for reservation in result.reservations:
            reservations.put_nowait(reservation)

    async with AsyncExitStack() as stack:
        node = make_node(connector=connector)
        node.start(on_result)
        stack.push_async_callback(node.close)
        p, h, store = (Holder(hub, node_id) for node_id in ("p", "h", "store"))
        for holder in (p, h, store):
            stack.push_async_callback(holder.close)
        before = EngineRequest("before", PROMPT[: num_here * BLOCK_SIZE + 1], SamplingParams(max_tokens=1, seed=0))
        request = EngineRequest("r", PROMPT, SamplingParams(max_tokens=3, seed=0), role=KVRole.CONSUME, receive=True)
        if num_here:
            await node.engine_thread.call(lambda engine: engine.add(before))
            await over.wait()
        await node.engine_thread.call(lambda engine: engine.add(request))
        async with asyncio.timeout(PATIENCE):
            reservation = await reservations.get()
        assert len(reservation.missing) == NUM_BLOCKS - num_here
        missing: list[int] = []
        refused: list[RefusedBlock] = []
        receiver = Receiver(
            ReceptionContext(
                connector,
                node.engine_thread,
                FetchesUnderWay(lambda: 0.0),
                absences or Absences(lambda: 0.0),
                outages or Outages(lambda: 0.0),
                block_size=BLOCK_SIZE,
                fetch_timeout=fetch_timeout,
                patience=patience,
                on_refused=refused.append,
            ),
            reservation,
            on_missing=missing.append,
            ends_at=None if time_left is None else asyncio.get_running_loop().time() + time_left,
        )
        yield Reception(node, connector, reservation, p, h, store, receiver, missing, refused)
        await node.engine_thread.call(lambda engine: engine.abort("r"))
        await node.check_idle()
