"""Logits that are not finite: what a prefill node says of them, and what a decode node does that hears of them."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from decode_node.service import DecodeService
from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.errors import NotFiniteError
from kvrelay.core.kv.block_hash import BlockHash, block_hashes
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.rpc.wire import source_to_wire
from kvrelay.engine.plan import ModelRunnerOutput, SchedulerOutput
from kvrelay.engine.runner import LaunchedStep
from kvrelay.engine.sampling.sampler import NO_TOKEN
from kvrelay.engine.step_result import Reservation
from kvrelay.v1 import decode_node_pb2 as pb
from prefill_node.service import PrefillService
from tests.engine.fake_runner import FakeRunner
from tests.engine.finished_step import FinishedStep
from tests.node.fake_node import BLOCK_SIZE, NAMESPACE, NUM_BLOCKS, make_node, serving
from tests.node.holders import Holder
from tests.node.prefill_calls import prefill
from tests.node.router_end import PATIENCE, PROMPT, Router, admit


class NotFiniteRunner(FakeRunner):
    """A runner that has no token for any row."""

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        results = [
            replace(result, sampled=tuple(replace(one, token_id=NO_TOKEN) for one in result.sampled))
            for result in super().launch(plan).collect().results
        ]
        return FinishedStep(ModelRunnerOutput(tuple(results)))


class SlowlyForgetful(InProcessConnector):
    """A connector that takes some turns of the loop to forget blocks."""

    num_forgotten = 0

    async def discard(self, names: Sequence[BlockHash]) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        self.num_forgotten += len(names)


async def test_a_prefill_ends_with_an_error_of_its_own_when_a_store_has_forgotten_its_blocks() -> None:
    connector = SlowlyForgetful(InProcessHub())
    node = make_node(NotFiniteRunner(NUM_BLOCKS, BLOCK_SIZE), connector=connector)
    async with serving(PrefillService, node) as service, asyncio.timeout(PATIENCE):
        async with aclosing(prefill(service, "a", [1] * 40)) as events:
            with pytest.raises(NotFiniteError):
                async for _ in events:
                    pass
        assert connector.num_forgotten > 0
        await node.check_idle()


@pytest.mark.parametrize("distrust", [False, True])
async def test_the_next_request_does_not_find_what_the_router_distrusts(*, distrust: bool) -> None:
    hub = InProcessHub()
    holder = Holder(hub, "p")
    names = list(block_hashes(NAMESPACE.root(), PROMPT, BLOCK_SIZE))
    blocks = tuple(NamedBlock(index, name, BLOCK_SIZE) for index, name in enumerate(names))
    await holder.hold(Reservation("a", 0, blocks), len(blocks))
    runner = FakeRunner(NUM_BLOCKS, BLOCK_SIZE)
    runner.pool = [[0] * BLOCK_SIZE for _ in runner.pool]  # it does not see what is fetched
    node = make_node(runner, InProcessConnector(hub))
    async with serving(DecodeService, node) as service, asyncio.timeout(PATIENCE):
        router = Router(service)
        pull = pb.Pull(request_id="a", source=source_to_wire(holder.source), num_blocks=len(blocks))
        router.send(admit("a"), pb.DecodeCommand(pull=pull))
        assert (await router.event()).HasField("admitted")
        while len(await node.engine_thread.call(lambda engine: engine.pool.lookup(names))) < len(names):
            pass
        abort = pb.Abort(request_id="a", distrust=distrust)
        router.send(pb.DecodeCommand(abort=abort), admit("b", local_prefill=True))
        computed = await router.event()
        assert computed.request_id == "b"
        assert computed.prompt_computed.num_cached_tokens == (0 if distrust else len(names) * BLOCK_SIZE)
        await router.close()
        await node.check_idle()
    await holder.close()
