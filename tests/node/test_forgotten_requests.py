"""What an aborted request leaves in a node: nothing, not even until a collection of garbage, since its prompt may be
long. What the engine reports of it later changes nothing."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import pytest

from decode_node.service import DecodeService
from kv_connector.in_process import InProcessHub
from kvrelay.core.errors import KVRelayError
from kvrelay.engine.step_result import StepResult
from kvrelay.v1 import common_pb2
from kvrelay.v1 import decode_node_pb2 as pb
from prefill_node.service import PrefillService
from tests.node.fake_node import FailingRunner, StepwiseRunner, make_node, serving
from tests.node.holders import LadderConnector
from tests.node.prefill_calls import prefill, prefill_request, run
from tests.node.router_end import PATIENCE, PROMPT, Router, admit

pytestmark = pytest.mark.usefixtures("without_collections")


async def test_a_request_that_was_aborted_while_it_received_is_forgotten() -> None:
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        router.send(admit("a"))
        assert (await router.event()).HasField("admitted")
        await asyncio.sleep(0)  # the reception waits for its blocks
        receiver = service._active["a"].receiver
        assert receiver is not None
        forgotten = weakref.ref(receiver)
        del receiver
        router.send(pb.DecodeCommand(abort=pb.Abort(request_id="a")))
        await _until_none(forgotten)
        await node.check_idle()
        await router.close()


async def test_a_prefill_that_was_aborted_while_it_received_is_forgotten() -> None:
    connector = LadderConnector(InProcessHub())
    connector.hung = {"h"}
    async with serving(PrefillService, node := make_node(connector=connector)) as service:
        request = prefill_request("a", PROMPT)
        request.sources.add(source=common_pb2.KVSource(node_id="h", epoch=1, endpoint="h"), num_blocks=2)
        async with aclosing(run(service, request)) as events, asyncio.timeout(PATIENCE):
            await anext(events)
            while not connector.fetches:
                await asyncio.sleep(0)
            forgotten = weakref.ref(service._active["a"])
        await _until_none(forgotten)
        await node.check_idle()


async def test_a_prefill_that_has_failed_is_forgotten() -> None:
    async with serving(PrefillService, node := make_node(FailingRunner())) as service:
        failing = asyncio.create_task(_last(prefill(service, "a")))
        while "a" not in service._active:
            await asyncio.sleep(0)
        forgotten = weakref.ref(service._active["a"])
        with suppress(KVRelayError):
            await failing
        del failing
        await _until_none(forgotten)
        await node.check_idle()


async def test_an_abort_before_the_reception_has_begun_unpins_its_blocks() -> None:
    """The task is cancelled before its first step, so that no code in it ever runs."""
    async with serving(DecodeService, node := make_node()) as service:
        aborted = asyncio.Event()
        handle = node._handler

        def abort_at_once(result: StepResult) -> None:
            handle(result)
            for reservation in result.reservations:
                service._abort(reservation.request_id)
                aborted.set()

        node._handler = abort_at_once
        router = Router(service)
        router.send(admit("a"))
        async with asyncio.timeout(PATIENCE):
            await aborted.wait()
        await asyncio.sleep(0)  # the cancelled task ends
        await asyncio.sleep(0)  # and tells
        await node.check_idle()
        await router.close()


async def test_a_request_that_decodes_ends_when_it_is_aborted() -> None:
    """Not when it would by itself, dozens of steps later."""
    runner = StepwiseRunner()
    async with serving(DecodeService, node := make_node(runner)) as service:
        router = Router(service)
        router.send(admit("a", local_prefill=True, max_tokens=60))
        runner.steps.release(3)
        while not (await router.event()).tokens.token_ids:
            pass
        router.send(pb.DecodeCommand(abort=pb.Abort(request_id="a")))
        await router.all_taken()
        runner.steps.release(5)  # for a step under way; a further one would fail
        await node.check_idle()
        await router.close()


@pytest.mark.parametrize("what", ["reservations", "outputs", "failures"])
async def test_what_the_engine_reports_of_a_request_that_was_aborted_meanwhile_is_ignored(what: str) -> None:
    """But the blocks that it has reserved are unpinned."""
    async with serving(DecodeService, node := make_node(FailingRunner() if what == "failures" else None)) as service:
        handle, late = node._handler, list[StepResult]()
        node._handler = late.append
        router = Router(service)
        router.send(admit("a", local_prefill=what != "reservations"))
        await _until_reported(what, late)
        router.send(pb.DecodeCommand(abort=pb.Abort(request_id="a")))
        await router.all_taken()
        for result in late:
            handle(result)
        await node.check_idle()
        await router.close()


@pytest.mark.parametrize("what", ["reservations", "outputs", "failures"])
async def test_what_the_engine_reports_of_a_prefill_that_was_given_up_meanwhile_is_ignored(what: str) -> None:
    async with serving(PrefillService, node := make_node(FailingRunner() if what == "failures" else None)) as service:
        handle, late = node._handler, list[StepResult]()
        node._handler = late.append
        request = prefill_request("a", PROMPT)
        if what == "reservations":
            request.sources.add(source=common_pb2.KVSource(node_id="h", epoch=1, endpoint="h"), num_blocks=2)
        async with aclosing(run(service, request)) as events:
            await anext(events)
            await _until_reported(what, late)
        for result in late:
            handle(result)
        await node.check_idle()


async def _last(events: AsyncIterator[Any]) -> Any:
    return [event async for event in events][-1]


async def _until_reported(what: str, results: list[StepResult]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not any(getattr(result, what) for result in results):
            await asyncio.sleep(0)


async def _until_none(forgotten: "weakref.ref[Any]") -> None:
    async with asyncio.timeout(PATIENCE):
        while forgotten() is not None:
            await asyncio.sleep(0.001)
