"""Inboxes share a limit: when it is reached, the request whose client has left the most ends."""

from contextlib import aclosing
from functools import partial

import pytest

from kvrelay.core.errors import CancelledByPeerError
from kvrelay.core.generation.outputs import FinishReason
from kvrelay.core.rpc.wire import output_to_wire
from kvrelay.core.turns import ITEMS_AT_A_TIME
from kvrelay.v1 import decode_node_pb2
from router.relay.inbox import Inboxes
from tests.loop_turns import counting_turns
from tests.router.routed import a_request, begun, take, take_trace
from tests.router.scripted_cluster import cluster
from tests.router.scripted_nodes import token, until


def test_the_fullest_inbox_is_emptied_when_all_together_have_too_much() -> None:
    ended: list[str] = []
    inboxes: Inboxes[int] = Inboxes(max_items=4)
    one, two, three = (inboxes.open(partial(ended.append, name)) for name in ("one", "two", "three"))
    one.put_nowait(1)
    two.put_nowait(2)
    two.put_nowait(3)
    three.put_nowait(4)
    assert ended == []
    one.put_nowait(5)
    assert ended in (["one"], ["two"])  # which are equally full
    three.put_nowait(6)
    assert (len(ended), three.qsize()) == (1, 2)
    three.put_nowait(7)
    assert ended[1:] == ["three"] and three.empty()


async def test_what_was_read_and_what_a_closed_inbox_had_leaves_room() -> None:
    inboxes: Inboxes[int] = Inboxes(max_items=2)
    ended: list[str] = []
    one, two = (inboxes.open(partial(ended.append, name)) for name in ("one", "two"))
    one.put_nowait(1)
    two.put_nowait(2)
    two.close()
    two.put_nowait(3)
    for number in range(5):
        one.put_nowait(number)
        await one.get()
    assert two.empty() and ended == []
    one.put_nowait(8)
    assert ended == []
    one.put_nowait(9)
    assert ended == ["one"]


def test_an_inbox_is_emptied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, half a million items would keep the event loop waiting."""
    inboxes: Inboxes[int] = Inboxes(max_items=4)
    ended: list[int] = []
    inbox = inboxes.open(lambda: ended.append(inbox.qsize()))
    monkeypatch.setattr(inbox, "get_nowait", None)
    for number in range(9):
        inbox.put_nowait(number)
    assert ended == [0] and inbox.qsize() == inboxes._num_items == 4
    inbox.close()
    assert inbox.qsize() == inboxes._num_items == 0


async def test_a_request_whose_client_takes_too_little_ends_at_its_nodes_and_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request("slow"))) as slow:
        nodes.relay._inboxes._max_items = 3
        _, slow_id = await begun(nodes, slow, token(7))
        async with aclosing(nodes.relay.run(a_request("fast"))) as fast:
            _, fast_id = await begun(nodes, fast, token(7))
            for _ in range(4):
                nodes.decode.tokens(slow_id, token(8))
            assert await nodes.decode.aborted() == slow_id
            with pytest.raises(CancelledByPeerError, match="too slowly"):
                await take(slow)
            assert f"request {slow_id}: the client takes its tokens too slowly" in caplog.text
            nodes.decode.tokens(fast_id, token(9, finish=FinishReason.LENGTH))
            assert await take(fast) == token(9, finish=FinishReason.LENGTH)
            await take_trace(fast)
        await until(lambda: not nodes.relay._running.get("fast"))


async def test_the_loop_turns_while_a_client_that_had_fallen_behind_takes_what_waits_for_it() -> None:
    """Thousands of tokens may, and a client that takes each at once never waits."""
    num_tokens = 10_000
    async with cluster() as nodes, aclosing(nodes.relay.run(a_request())) as events:
        _, wire_id = await begun(nodes, events, token(7))
        event = decode_node_pb2.DecodeEvent(request_id=wire_id, tokens=output_to_wire(token(8)))
        nodes.decode.send(*[event] * num_tokens)
        await until(lambda: nodes.relay._running["r"]._inbox.qsize() >= num_tokens)
        async with counting_turns() as num_turns:
            for _ in range(num_tokens):
                assert await anext(events) == token(8)
            assert num_turns() >= num_tokens // ITEMS_AT_A_TIME - 1
