"""What a node does not take: a request for the process that was at its address before, or one that comes while it ends.
Its router hears that the request did nothing there."""

from collections.abc import Callable

import pytest

from decode_node.service import DecodeService
from kvrelay.core.errors import NotTakenError
from kvrelay.node.node import Node
from prefill_node.service import PrefillService
from tests.node.fake_node import EPOCH, make_node, serving
from tests.node.prefill_calls import PROMPT, prefill_request, run
from tests.node.router_end import Router, admit, failure


def drain(node: Node) -> None:
    node.draining = True


def crash(node: Node) -> None:
    node.crashed.set()


def nothing(node: Node) -> None:
    """Leaves the node as it is: the request is for another process."""


CASES = [
    pytest.param(EPOCH + 1, nothing, "node is another process than the one that was meant, of epoch 0x2", id="other"),
    pytest.param(0, nothing, "node is another process than the one that was meant, of epoch 0x0", id="no epoch"),
    pytest.param(EPOCH, drain, "node is draining", id="draining"),
    pytest.param(EPOCH, crash, "node has crashed", id="crashed"),
]


@pytest.mark.parametrize(("epoch", "happens", "why"), CASES)
async def test_a_decode_node_does_not_take_it(epoch: int, happens: Callable[[Node], None], why: str) -> None:
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        router.send(before := admit("before"))
        assert (await router.event()).HasField("admitted"), before
        command = admit("a")
        command.admit.epoch = epoch
        happens(node)
        router.send(command)
        event = await router.event()
        assert (event.request_id, repr(failure(event))) == ("a", repr(NotTakenError(why)))
        assert list(service._active) == ["before"]
        await router.close()
        await node.check_idle()


async def test_nor_does_a_decode_node_that_crashed_before_its_router_came() -> None:
    async with serving(DecodeService, node := make_node()) as service:
        crash(node)
        router = Router(service)
        router.send(admit("a"))
        assert isinstance(failure(await router.event()), NotTakenError)
        await router.close()


@pytest.mark.parametrize(("epoch", "happens", "why"), CASES)
async def test_a_prefill_node_does_not_take_it(epoch: int, happens: Callable[[Node], None], why: str) -> None:
    async with serving(PrefillService, node := make_node()) as service:
        request = prefill_request("a", PROMPT)
        request.epoch = epoch
        happens(node)
        with pytest.raises(NotTakenError, match=why):
            await anext(run(service, request))
        assert not service._active and not service._leases and not node.activity
        await node.check_idle()
