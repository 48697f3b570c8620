"""The room of admitted requests: they have it until they run, and whatever becomes of them it is given back."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from kvrelay.core.clock import MonotonicClock
from kvrelay.core.errors import CancelledByPeerError, InvalidRequestError, OverloadedError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from router.edge import edge as edge_module
from router.edge.body_budget import QUICK_BYTES, SMALL_BYTES
from router.edge.edge import Edge
from router.edge.fan_in import merged
from router.edge.gateway import create_app
from router.edge.metrics import RouterMetrics
from router.edge.openai_schema import CompletionBody
from router.edge.presence import PRESENCE, Presence
from router.edge.validation import ClientRequest, RequestValidator, TextPrompt, TokenPrompt
from router.request import RoutedRequest
from tests.checked_fields import note_checks
from tests.loop_turns import counting_turns
from tests.router.edge.edge_parts import MODEL, ScriptedRelay, make_edge
from tests.router.edge.gateway_client import COMPLETION, serving
from tests.router.routed import PROMPT, give_up
from tests.router.scripted_cluster import cluster


@dataclass
class CountingRelay(ScriptedRelay):
    """A relay that notes what it is asked about its capacity."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def check_capacity(self, num_admitting: int = 0, num_wanted: int = 1) -> None:
        self.asked.append((num_admitting, num_wanted))


async def admitted(edge: Edge, clients: Mapping[str, ClientRequest]) -> list[RoutedRequest]:
    """Returns requests that do not begin."""
    with edge.admission() as admission:
        return await edge.admit(clients, admission)


async def test_requests_that_are_being_tokenised_count_until_they_are_refused(tokenizer: Tokenizer) -> None:
    relay = CountingRelay(tokenizer)
    edge = make_edge(relay)
    long = ClientRequest(
        TextPrompt("x" * (LONG_TEXT_CHARS + 1)), SamplingParams()
    )  # tokenised in a thread, and too long
    refused = asyncio.create_task(admitted(edge, {"a": long, "b": long}))
    await asyncio.sleep(0)
    short = ClientRequest(TextPrompt("x"), SamplingParams())
    assert len(await admitted(edge, {"c": short})) == 1
    with pytest.raises(InvalidRequestError):
        await refused
    assert len(await admitted(edge, {"d": short, "e": short})) == 2
    assert relay.asked == [(0, 2), (2, 1), (0, 2)]


async def test_all_prompts_of_a_call_that_was_admitted_have_room(tokenizer: Tokenizer) -> None:
    """Though they begin one after the other, and other calls come in between."""
    async with cluster(max_concurrent_requests=3, local_prefill_max_tokens=64) as nodes:
        metrics = RouterMetrics(MODEL, CollectorRegistry())
        edge = Edge(nodes.relay, tokenizer, MODEL, metrics, MonotonicClock(), default_timeout=60.0)
        client = ClientRequest(TokenPrompt(PROMPT), SamplingParams())

        async def check_room_for_one() -> None:
            assert len(await admitted(edge, {"c": client})) == 1
            with pytest.raises(OverloadedError):
                await admitted(edge, {"c": client, "d": client})

        with edge.admission() as admission:
            routed = await edge.admit({"a": client, "b": client}, admission)
            await check_room_for_one()
            async with aclosing(merged([edge.generate(request) for request in routed])) as events:
                first = asyncio.create_task(anext(events))
                for _ in routed:
                    await nodes.decode.admit()
                await check_room_for_one()
                await give_up(first)
        assert len(await admitted(edge, dict.fromkeys("abc", client))) == 3


async def test_the_biases_of_a_call_are_checked_once_however_many_prompts_it_has(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be 65,536 of them together."""
    checked = note_checks(monkeypatch)
    relay = ScriptedRelay(tokenizer)
    async with serving(relay) as gateway:
        body = COMPLETION | {"prompt": ["one", "two", "three"], "logit_bias": {"5": 1}}
        assert (await gateway.post("/v1/completions", body)).status_code == 200
        assert checked.count("logit_bias") == 1
        first, *others = (request.sampling for request in relay.requests)
        assert len(others) == 2 and all(sampling.logit_bias is first.logit_bias for sampling in others)
        assert len({first.seed, *(sampling.seed for sampling in others)}) == 3
        refused = await gateway.post("/v1/completions", body | {"logit_bias": {"5": 101}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")


@pytest.mark.parametrize(("field", "entries"), [("logit_bias", {"5": 1, "6": 1}), ("stop_token_ids", [5, 6])])
async def test_the_prompts_of_a_call_have_no_more_token_entries_than_one_may_have(
    field: str, entries: object, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of less than a megabyte would otherwise become gigabytes at the nodes."""
    monkeypatch.setattr(edge_module, "MAX_TOKEN_ENTRIES", 6)
    relay = ScriptedRelay(tokenizer)
    async with serving(relay) as gateway:
        body = COMPLETION | {field: entries}
        assert (await gateway.post("/v1/completions", body | {"prompt": ["a"] * 3})).status_code == 200
        refused = await gateway.post("/v1/completions", body | {"prompt": ["a"] * 4})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert (
        "has 2 entries for each of 4 prompts, together more than the 6 of a call" in refused.json()["error"]["message"]
    )
    assert len(relay.requests) == 3


async def test_an_abort_is_not_lost_before_its_request_begins(tokenizer: Tokenizer) -> None:
    relay = ScriptedRelay(tokenizer, max_model_len=10**6)
    edge = make_edge(relay)
    client = ClientRequest(TextPrompt("x" * (LONG_TEXT_CHARS + 1)), SamplingParams())
    admission = asyncio.create_task(admitted(edge, {"mine": client}))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="'mine' is running already"):
        await admitted(edge, {"mine": client})
    edge.abort("mine")
    edge.abort("nobody")
    with pytest.raises(CancelledByPeerError, match="mine was aborted"):
        await admission
    with edge.admission() as again:
        [routed] = await edge.admit({"mine": client}, again)  # the id is free again
        edge.abort("mine")
        with pytest.raises(CancelledByPeerError, match="mine was aborted"):
            await anext(edge.generate(routed))
    assert not relay.requests


async def test_a_call_that_ends_does_not_take_the_room_of_one_that_has_its_id_now(tokenizer: Tokenizer) -> None:
    relay = CountingRelay(tokenizer)
    edge = make_edge(relay)
    client = ClientRequest(TextPrompt("x"), SamplingParams())
    first, second = edge.admission(), edge.admission()
    [routed] = await edge.admit({"mine": client}, first)
    async with aclosing(edge.generate(routed)) as events:
        await anext(events)
    await edge.admit({"mine": client}, second)
    first.close()
    await admitted(edge, {"other": client})
    second.close()
    await admitted(edge, {"other": client})
    assert [num_admitting for num_admitting, _ in relay.asked] == [0, 0, 1, 0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 200),
        ({"prompt": ["a", "b", "c"]}, 200),
        ({"prompt": [[5], [10**6]]}, 400),
        ({"prompt": [[5] * 250] * 4, "echo": True, "n": 64, "logprobs": 20, "max_tokens": 0}, 400),
        ({"prompt": "a" * 99, "echo": True}, 400),
    ],
)
async def test_whatever_becomes_of_a_call_its_room_is_given_back(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], status: int, stream: bool
) -> None:
    monkeypatch.setattr("router.edge.echo.MAX_CHARS", 50)
    relay = CountingRelay(tokenizer)
    async with serving(relay) as gateway:
        answer = await gateway.post("/v1/completions", COMPLETION | {"stream": stream} | change)
        assert answer.status_code == status, answer.text
        await gateway.post("/v1/completions", COMPLETION)
    assert relay.asked[-1] == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["a"], ["a", "b", "c", "d"]])
async def test_whenever_a_client_leaves_its_room_is_given_back(
    tokenizer: Tokenizer, prompts: list[str], stream: bool
) -> None:
    """Some of its requests, or all, may not have begun, unless there is only one: that begins at once."""
    relay = ScriptedRelay(tokenizer, hang_at=0)
    edge = make_edge(relay)
    app = create_app(edge, version="1.2.3", max_body_bytes=1 << 20)
    body = json.dumps(COMPLETION | {"prompt": prompts, "stream": stream}).encode()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    left_waiting: set[int] = set()

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        pass

    async def leave(presence: Presence, num_turns: int) -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        left_waiting.add(len(edge._admissions))
        presence.leave()

    for num_turns in range(30):
        presence = Presence()
        leaving = asyncio.create_task(leave(presence, num_turns))
        await app({**scope, "state": {PRESENCE: presence}}, receive, send)
        assert leaving.done()
        assert (len(edge._admissions), relay.num_running) == (0, 0)
    expected = range(len(prompts) + 1) if len(prompts) > 1 else [0]
    assert left_waiting == set(expected), "a client left when so many had not begun"


@asynccontextmanager
async def noting_turns(monkeypatch: pytest.MonkeyPatch, *methods: tuple[type, str]) -> AsyncIterator[list[int]]:
    """Yields a list that gets the number of the loop's turn at each call of these methods."""
    turns: list[int] = []

    def noting(function: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: object, **kwargs: object) -> object:
            turns.append(num_turns())
            return function(*args, **kwargs)

        return noted

    for cls, name in methods:
        monkeypatch.setattr(cls, name, noting(getattr(cls, name)))
    async with counting_turns() as num_turns:
        yield turns


@pytest.mark.parametrize("num_bytes", [QUICK_BYTES, SMALL_BYTES])
async def test_the_loop_turns_between_parsing_a_body_making_its_call_and_checking_that(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """With thousands of biases, each takes long."""
    large = COMPLETION | {"ignored": "x" * num_bytes}
    parts = ((CompletionBody, "parse"), (CompletionBody, "sampling"), (RequestValidator, "sampling"))
    async with serving(ScriptedRelay(tokenizer)) as gateway, noting_turns(monkeypatch, *parts) as turns:
        assert (await gateway.post("/v1/completions", large)).status_code == 200
    assert len(turns) == len(set(turns)) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_small_request_begins_in_the_turn_in_which_it_is_parsed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Turns are long while hundreds of streams share the loop."""
    ends = ((CompletionBody, "parse"), (ScriptedRelay, "run"))
    async with serving(ScriptedRelay(tokenizer)) as gateway, noting_turns(monkeypatch, *ends) as turns:
        assert (await gateway.post("/v1/completions", COMPLETION | {"stream": stream})).status_code == 200
    assert len(turns) == 2 and len(set(turns)) == 1


async def test_the_loop_turns_between_the_prompts_of_a_call(relay: ScriptedRelay) -> None:
    """A hundred texts that are just short enough to be tokenised at once would hold up every other request."""
    sampling = SamplingParams()
    clients = {str(i): ClientRequest(TextPrompt("The capital"), sampling) for i in range(30)}
    async with counting_turns() as num_turns:
        await admitted(make_edge(relay), clients)
        assert num_turns() >= len(clients) - 1
