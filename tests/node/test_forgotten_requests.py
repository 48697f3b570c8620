"""What an aborted request leaves in a node: nothing, not even until a collection of garbage. Its prompt may be long."""

import asyncio
import weakref
from contextlib import aclosing, suppress
from typing import Any, cast

import pytest

from decode_node.service import DecodeService
from kv_connector.in_process import InProcessHub
from kvrelay.core.errors import KVRelayError
from kvrelay.core.rpc import Context
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.core.wire import sampling_to_wire
from kvrelay.v1 import common_pb2, prefill_node_pb2
from kvrelay.v1 import decode_node_pb2 as pb
from prefill_node.service import PrefillService
from tests.node.fake_node import FailingRunner, make_node, serving
from tests.node.holders import LadderConnector
from tests.node.router_end import PATIENCE, PROMPT, Router, admit

pytestmark = pytest.mark.usefixtures("without_collections")

_NO_CONTEXT = cast(Context, None)  # the service reads nothing from it


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
        request = _prefill_request()
        request.sources.add(source=common_pb2.KVSource(node_id="h", epoch=1, endpoint="h"), num_blocks=2)
        async with aclosing(service.Prefill(request, _NO_CONTEXT)) as events, asyncio.timeout(PATIENCE):
            await anext(events)
            while not connector.fetches:
                await asyncio.sleep(0)
            forgotten = weakref.ref(service._active["a"].events)
        await _until_none(forgotten)
        await node.check_idle()


async def test_a_prefill_that_has_failed_is_forgotten() -> None:
    async with serving(PrefillService, node := make_node(FailingRunner())) as service:
        events = service.Prefill(_prefill_request(), _NO_CONTEXT)
        await anext(events)
        forgotten = weakref.ref(service._active["a"].events)
        with suppress(KVRelayError):
            await anext(events)
        del events
        await _until_none(forgotten)
        await node.check_idle()


def _prefill_request() -> prefill_node_pb2.PrefillRequest:
    sampling = sampling_to_wire(SamplingParams(max_tokens=3, temperature=0.0, seed=0))
    return prefill_node_pb2.PrefillRequest(
        request_id="a", prompt_token_ids=PROMPT, sampling_params=sampling, lease_ttl_ms=60_000
    )


async def _until_none(forgotten: "weakref.ref[Any]") -> None:
    async with asyncio.timeout(PATIENCE):
        while forgotten() is not None:
            await asyncio.sleep(0.001)
