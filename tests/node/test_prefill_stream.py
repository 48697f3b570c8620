"""The stream of a router to a prefill node: its requests are ended one by one, and all with it."""

import asyncio
from collections.abc import Sequence

import pytest

from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.errors import DeadlineError, InvalidRequestError
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.rpc.errors import error_from_status
from kvrelay.v1 import prefill_node_pb2 as pb
from prefill_node import service as prefill_service
from prefill_node.router_stream import RouterStream
from prefill_node.service import PrefillService
from tests.node.fake_node import GatedRunner, make_node, serving
from tests.node.prefill_calls import PATIENCE, PROMPT, prefill_command, release_command
from tests.node.router_end import RouterEnd


class PrefillRouter(RouterEnd[pb.PrefillCommand, pb.PrefillCommands, pb.PrefillEvent]):
    """The router's end of the stream."""

    def __init__(self, service: PrefillService) -> None:
        super().__init__(service, lambda commands: pb.PrefillCommands(commands=commands))


class HeldUpConnector(InProcessConnector):
    """A connector that publishes once the test lets it."""

    def __init__(self) -> None:
        super().__init__(InProcessHub())
        self.may_publish = asyncio.Event()

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        await self.may_publish.wait()
        await super().publish(blocks)


async def until_ended(router: PrefillRouter, request_id: str) -> list[tuple[str, str | None]]:
    """Returns the events up to the last one of this request: of which each is, and what it is."""
    found: list[tuple[str, str | None]] = []
    while (request_id, "ended") not in found:
        event = await router.event()
        found.append((event.request_id, event.WhichOneof("event")))
    return found


async def test_events_of_one_turn_travel_together_and_those_before_the_end_are_delivered() -> None:
    stream = RouterStream()
    for request_id in ("a", "b", "a"):
        stream.send(pb.PrefillEvent(request_id=request_id, accepted=pb.PrefillAccepted()))
    updates = aiter(stream.updates())
    assert [event.request_id for event in (await anext(updates)).events] == ["a", "b", "a"]
    stream.send_failure("a", InvalidRequestError("bad", field="prompt"))
    stream.close()
    [failed] = (await anext(updates)).events
    error = error_from_status(failed.failed.status)
    assert isinstance(error, InvalidRequestError) and error.field == "prompt"
    assert [update async for update in updates] == []


async def test_a_release_ends_a_prefill_that_has_not_finished_and_no_other() -> None:
    runner = GatedRunner()
    async with serving(PrefillService, node := make_node(runner)) as service:
        router = PrefillRouter(service)
        router.send(prefill_command("a"), prefill_command("b", PROMPT[:10]), release_command("unknown"))
        await router.all_taken()
        assert list(service._leases) == ["a", "b"]
        router.send(release_command("a"))
        await router.all_taken()
        assert list(service._active) == list(service._leases) == ["b"]
        runner.gate.set()
        found = await until_ended(router, "b")
        assert ("b", "finished") in found and ("a", "finished") not in found
        assert list(service._leases) == ["b"]
        router.send(release_command("b"), release_command("b"))
        await router.all_taken()
        await node.check_idle()
        assert not service._leases and not node.activity
        await router.close()


async def test_a_release_of_a_prefill_that_publishes_yet_lets_it_end() -> None:
    """The decode node may still fetch what is under way."""
    connector = HeldUpConnector()
    async with serving(PrefillService, node := make_node(connector=connector)) as service:
        router = PrefillRouter(service)
        router.send(prefill_command("a"))
        while not (await router.event()).HasField("finished"):
            pass
        router.send(release_command("a"))
        await router.all_taken()
        assert not service._leases
        connector.may_publish.set()
        await until_ended(router, "a")
        await node.check_idle()
        assert not node.activity
        await router.close()


async def test_the_end_of_a_stream_leaves_the_leases_of_its_finished_prompts() -> None:
    runner = GatedRunner()
    runner.gate.set()
    async with serving(PrefillService, node := make_node(runner)) as service:
        router, other = PrefillRouter(service), PrefillRouter(service)
        router.send(prefill_command("a"))
        await until_ended(router, "a")
        runner.gate.clear()
        router.send(prefill_command("b"))
        other.send(prefill_command("c"))
        await router.all_taken()
        await other.all_taken()
        router.end_commands()
        await router.ended()
        assert list(service._leases) == ["a", "c"] and list(service._active) == ["c"]
        runner.gate.set()
        await until_ended(other, "c")
        other.send(release_command("a"), release_command("c"))
        await other.all_taken()
        await node.check_idle()
        await other.close()


async def test_a_request_that_is_sent_twice_is_computed_once_and_another_routers_is_refused() -> None:
    async with serving(PrefillService, node := make_node()) as service:
        router, other = PrefillRouter(service), PrefillRouter(service)
        router.send(prefill_command("a"), prefill_command("a"))
        await router.all_taken()
        other.send(prefill_command("a"))
        refused = await other.event()
        assert "is running already" in str(error_from_status(refused.failed.status))
        found = await until_ended(router, "a")
        assert found.count(("a", "finished")) == 1 and ("a", "failed") not in found
        other.send(release_command("a"))
        await other.all_taken()
        await node.check_idle()
        await router.close()
        await other.close()


async def test_a_prefill_is_ended_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its router says what it waited for, unless that hangs."""
    monkeypatch.setattr(prefill_service, "_DEADLINE_MARGIN_SECONDS", 0.05)
    runner = GatedRunner()
    async with serving(PrefillService, node := make_node(runner)) as service, asyncio.timeout(PATIENCE):
        router = PrefillRouter(service)
        command = prefill_command("a")
        command.prefill.timeout_ms = 1
        router.send(command)
        while not (event := await router.event()).HasField("failed"):
            pass
        assert isinstance(error_from_status(event.failed.status), DeadlineError)
        assert not service._leases and not node.activity
        runner.gate.set()
        await node.check_idle()
        await router.close()
