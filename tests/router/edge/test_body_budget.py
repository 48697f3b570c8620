"""What the bodies of all HTTP requests together may take: those that find no room wait, and small ones do not."""

import asyncio
import json
import tracemalloc
from collections import Counter
from functools import partial

import pytest
from starlette.requests import Request
from starlette.types import Message

from kvrelay.text.tokenizer import Tokenizer
from router.edge import gateway as gateway_module
from router.edge.body_budget import SMALL_BYTES, BodyBudget, BodyShare
from router.edge.http_exchange import read_json_body
from tests.loop_turns import counting_turns
from tests.router.edge.edge_parts import ScriptedRelay
from tests.router.edge.gateway_client import COMPLETION, serving
from tests.router.scripted_nodes import PATIENCE, until

MIB = 1 << 20


def begin(share: BodyShare, num_bytes: int) -> asyncio.Task[None]:
    return asyncio.create_task(share.hold(num_bytes))


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_bodies_that_find_no_room_wait_and_go_on_in_the_order_in_which_they_came() -> None:
    budget = BodyBudget(4 * MIB)
    first, second, third, fourth = (budget.share() for _ in range(4))
    await first.hold(2 * MIB)
    await second.hold(2 * MIB)
    waiting = [begin(third, 3 * MIB), begin(fourth, MIB), begin(second, 3 * MIB)]
    await turn()
    assert [task.done() for task in waiting] == [False, False, False]
    first.give_back()
    await turn()
    assert [task.done() for task in waiting] == [False, False, True], "the fourth would fit, but the third is older"
    second.give_back()
    await turn()
    assert [task.done() for task in waiting] == [True, True, True]


async def test_the_body_that_came_first_never_waits_and_what_it_has_more_counts() -> None:
    budget = BodyBudget(2 * MIB)
    first, second, third = (budget.share() for _ in range(3))
    await first.hold(MIB)
    await second.hold(MIB)
    async with asyncio.timeout(PATIENCE):
        await first.hold(4 * MIB)
    waiting = [begin(third, MIB)]
    first.give_back()
    async with asyncio.timeout(PATIENCE):
        await second.hold(2 * MIB)
    await turn()
    assert not waiting[0].done()
    second.give_back()
    await asyncio.wait_for(waiting[0], PATIENCE)


async def test_a_body_that_has_what_it_needs_does_not_wait_though_the_first_one_has_more_than_there_is() -> None:
    """An empty chunk may end it."""
    budget = BodyBudget(2 * MIB)
    first, second = budget.share(), budget.share()
    await first.hold(MIB)
    await second.hold(MIB)
    await first.hold(4 * MIB)
    async with asyncio.timeout(PATIENCE):
        await second.hold(MIB)


async def test_a_small_body_never_waits_and_is_not_in_the_way_of_others() -> None:
    budget = BodyBudget(MIB)
    small, large, more = (budget.share() for _ in range(3))
    await small.hold(SMALL_BYTES)
    await large.hold(8 * MIB)
    async with asyncio.timeout(PATIENCE):
        await more.hold(SMALL_BYTES)


async def test_one_that_has_given_up_takes_nothing() -> None:
    budget = BodyBudget(2 * MIB)
    first, last = budget.share(), budget.share()
    await first.hold(MIB)
    with budget.share() as share:
        waiting = begin(share, 2 * MIB)
        await turn()
        assert share.waits
        waiting.cancel()
        await turn()
        assert share.waited_in_vain and not share.waits
    async with asyncio.timeout(PATIENCE):
        await last.hold(MIB)


async def test_large_bodies_are_parsed_in_different_turns_of_the_event_loop() -> None:
    budget = BodyBudget(8 * MIB)
    loop_turn, parsed_in = 0, []

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(MIB), "more_body": False}

    async def parse() -> None:
        with budget.share() as share:
            await read_json_body(Request({"type": "http", "headers": []}, receive), MIB, share)
            parsed_in.append(loop_turn)

    parsing = [asyncio.create_task(parse()) for _ in range(4)]
    while not all(task.done() for task in parsing):
        loop_turn += 1
        await asyncio.sleep(0)
    assert len(set(parsed_in)) == 4


@pytest.mark.parametrize("num_bytes", [2, SMALL_BYTES])
async def test_of_small_bodies_that_come_together_a_few_are_parsed_in_a_turn_of_the_event_loop(num_bytes: int) -> None:
    """Else streams would stand still while all clients that were refused come back."""
    budget = BodyBudget(8 * MIB)
    parsed_in: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(num_bytes), "more_body": False}

    async with counting_turns() as num_turns:

        async def parse() -> None:
            with budget.share() as share:
                await read_json_body(Request({"type": "http", "headers": []}, receive), MIB, share)
                parsed_in.append(num_turns())

        await asyncio.gather(*(parse() for _ in range(100)))
    assert max(Counter(parsed_in).values()) <= 16


async def test_however_many_large_bodies_come_at_once_few_are_held_and_all_are_answered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile a small request is served."""
    num_bodies, num_bytes = 24, 900_000
    budgets = _observed_budgets(monkeypatch, at_a_time=2)
    data = json.dumps(COMPLETION | {"ignored": "x" * num_bytes}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(data)
    async with serving(ScriptedRelay(tokenizer)) as gateway, asyncio.timeout(6 * PATIENCE):
        connections = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(num_bodies)]
        tracemalloc.start()
        try:
            for _, writer in connections:
                writer.write(head + data[:-1])
                await writer.drain()
            await until(lambda: _num_waiting(budgets[0]) >= num_bodies - 3)
            in_client = sum(writer.transport.get_write_buffer_size() for _, writer in connections)
            assert tracemalloc.get_traced_memory()[0] - in_client < num_bodies * num_bytes / 2
            assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200
        finally:
            tracemalloc.stop()
        for _, writer in connections:
            writer.write(data[-1:])
        for reader, writer in connections:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_a_body_that_waits_for_room_in_vain_is_to_come_later_and_counted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = _observed_budgets(monkeypatch, at_a_time=1)
    monkeypatch.setattr(gateway_module, "read_json_body", partial(read_json_body, seconds=0.1))
    large = COMPLETION | {"ignored": "x" * 2 * SMALL_BYTES}
    async with serving(ScriptedRelay(tokenizer)) as gateway:
        with budgets[0].share() as other:
            await other.hold(2 * MIB)
            answer = await gateway.post("/v1/completions", large)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["type"] == "overloaded_error"
            metrics = await gateway.http.get("/metrics")
            assert 'request_errors_total{code="RESOURCE_EXHAUSTED",model_name="tiny-model"} 1.0' in metrics.text
        assert (await gateway.post("/v1/completions", large)).status_code == 200


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"model": "another"}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
async def test_whatever_becomes_of_a_request_its_body_counts_no_longer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object], more: dict[str, object]
) -> None:
    budgets = _observed_budgets(monkeypatch, at_a_time=1)
    async with serving(ScriptedRelay(tokenizer)) as gateway:
        answer = await gateway.post(path, {**body, **more, "ignored": "x" * 2 * SMALL_BYTES})
        assert answer.status_code == (404 if "model" in more else 200)
        with budgets[0].share() as first, budgets[0].share() as second:
            async with asyncio.timeout(PATIENCE):  # there is as much room as at first
                await first.hold(MIB - SMALL_BYTES - 1)
                await second.hold(SMALL_BYTES + 1)


def _observed_budgets(monkeypatch: pytest.MonkeyPatch, *, at_a_time: int) -> list[BodyBudget]:
    """Lets gateways that are made from now on have room for so many bodies of a mebibyte, which are those of
    `serving`. Their budgets get into the returned list."""
    budgets: list[BodyBudget] = []

    def make(max_bytes: int) -> BodyBudget:
        budgets.append(BodyBudget(max_bytes))
        return budgets[-1]

    monkeypatch.setattr(gateway_module, "BODIES_AT_A_TIME", at_a_time)
    monkeypatch.setattr(gateway_module, "BodyBudget", make)
    return budgets


def _num_waiting(budget: BodyBudget) -> int:
    return sum(share.waits for share in budget._shares)
