"""A fetch that never returns is noticed: the node counts as crashed, since only a restart gives the blocks back."""

import asyncio
from contextlib import ExitStack

import pytest

from kv_connector.settings import UcxSettings
from kv_connector.ucx.connector import UcxConnector
from kvrelay.core.errors import KVError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.step_result import Reservation, StepResult
from kvrelay.node.fetches_under_way import FetchesUnderWay
from tests.kv_connector.backends import CLUSTER_SECRET, EPOCH
from tests.kv_connector.backends import Node as Holder
from tests.kv_connector.ucx.stubborn_request import StubbornRequest
from tests.manual_clock import ManualClock
from tests.node.fake_node import LAYOUT, make_node

PATIENCE = 10.0


def test_a_fetch_shows_no_life_once_its_time_is_over_whatever_others_do() -> None:
    clock = ManualClock()
    fetches = FetchesUnderWay(clock.now)
    with ExitStack() as stack:
        stack.enter_context(fetches.fetch("late", 5.0))
        with fetches.fetch("early", 3.0):
            assert fetches.sign_of_life() != fetches.sign_of_life()
            clock.seconds += 3.0
            seen = fetches.sign_of_life()
            with fetches.fetch("short", 1.0), fetches.fetch("short", 1.0):
                clock.seconds += 2.0
                assert fetches.sign_of_life() == seen
                assert "a fetch from early has not returned 60 seconds after" in str(fetches.hung(60.0))
            assert fetches.sign_of_life() == seen
        late = fetches.sign_of_life()
        assert late != seen and late == fetches.sign_of_life()
    assert fetches.sign_of_life() != fetches.sign_of_life(), "all have returned"


@pytest.mark.parametrize("error", [KVError, asyncio.CancelledError])
def test_a_fetch_that_fails_or_is_cancelled_has_returned_too(error: type[BaseException]) -> None:
    clock = ManualClock()
    fetches = FetchesUnderWay(clock.now)
    with pytest.raises(error), fetches.fetch("owner", 1.0):
        raise error
    clock.seconds += 5.0
    assert fetches.sign_of_life() != fetches.sign_of_life()


async def test_a_node_whose_blocks_ucx_does_not_let_go_of_counts_as_crashed(caplog: pytest.LogCaptureFixture) -> None:
    """Its request would wait for ever, and no other would get the blocks."""
    holder = Holder(UcxConnector(UcxSettings(CLUSTER_SECRET)), "holder", 1, LAYOUT, EPOCH)
    connector = UcxConnector(UcxSettings(CLUSTER_SECRET))
    node = make_node(connector=connector)
    reservations: asyncio.Queue[Reservation] = asyncio.Queue()

    def on_result(result: StepResult) -> None:
        for reservation in result.reservations:
            reservations.put_nowait(reservation)

    node.start(on_result)
    request = EngineRequest(
        "r", tuple(range(20)), SamplingParams(max_tokens=3, seed=0), role=KVRole.CONSUME, receive=True
    )
    await node.engine_thread.call(lambda engine: engine.add(request))
    async with asyncio.timeout(PATIENCE):
        reservation = await reservations.get()
    await connector.fetch(holder.source, reservation.missing, timeout=PATIENCE)  # connects; the holder has nothing
    [lane] = connector._require().peers[holder.source.endpoint]._idle
    stubborn = StubbornRequest()
    lane.link._posted.append((stubborn, None, None))

    receiver = node.receiver(reservation, ends_at=asyncio.get_running_loop().time() + 0.1)
    receiver.announce(holder.source, 3)
    receiver.end()
    reception = asyncio.create_task(receiver.run())
    node.watch(1.0)
    async with asyncio.timeout(PATIENCE):
        while not node.crashed.is_set():
            node.engine_thread.post(lambda engine: None)  # the engine works meanwhile
            await asyncio.sleep(0.01)
    assert "a fetch from holder has not returned 1 seconds after its time was over" in caplog.text
    assert connector.stats.quarantined == 3 and not reception.done()
    stubborn.completed = True
    await asyncio.wait_for(reception, PATIENCE)
    await node.engine_thread.call(lambda engine: engine.abort("r"))
    await node.check_idle()
    await node.close()
    await holder.connector.close()
