"""Requests are built ahead of their time and in slices: a long prompt does not hold up other streams' tokens."""

import asyncio
import itertools
import json
from collections import Counter
from functools import partial

import pytest

from kvrelay.bench import load as load_module
from kvrelay.bench.base import Answer, Client, Generation, Prompt, Segment, Send
from kvrelay.bench.grpc_client import GrpcClient
from kvrelay.bench.json_body import chat_body, completion_body
from kvrelay.bench.load import MAX_READY, Load
from kvrelay.bench.openai_client import OpenAIClient
from kvrelay.bench.prompts import PromptBuilder, Vocabulary
from kvrelay.bench.workloads import Lengths, arriving, random_requests
from kvrelay.core.clock import MonotonicClock
from tests.bench.servers import DONE, LAST, PIECE, USAGE, answering

GENERATION = Generation(temperature=0.0, ignore_eos=True, timeout=60.0)
TEXT = 'naïve "∞" \\ \n 🐈 ' * 10_000
BUILDER = PromptBuilder(Vocabulary.of_size(4096), "token_ids", seed=1)


@pytest.mark.parametrize("prompt", [(), (7,), tuple(range(10_000)), "", "short", TEXT])
def test_pieces_of_a_completion_are_its_json(prompt: Prompt) -> None:
    whole = b"".join(completion_body({"model": "m", "max_tokens": 4}, prompt))
    assert json.loads(whole) == {
        "model": "m",
        "max_tokens": 4,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
    }


def test_pieces_of_a_chat_are_its_json() -> None:
    body = b"".join(chat_body({"model": "m"}, (("user", TEXT), ("assistant", ""), ("user", "b"))))
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": ""}]
    assert json.loads(body) == {"model": "m", "messages": [*messages, {"role": "user", "content": "b"}]}


class Turns:
    """A counter of the loop's turns while the context is open."""

    def __init__(self) -> None:
        self.count = 0

    async def __aenter__(self) -> "Turns":
        self._counting = asyncio.create_task(self._run())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._counting.cancel()

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def test_drawing_a_long_prompt_lets_the_loop_turn() -> None:
    async with Turns() as turns:
        await BUILDER.conversation("0").ask([Segment("long", 190_000)])
    assert turns.count > 50


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_encoding_a_long_prompt_lets_the_loop_turn(protocol: str) -> None:
    clock = MonotonicClock()
    client: Client = (
        GrpcClient("127.0.0.1:1", GENERATION, clock)
        if protocol == "grpc"
        else OpenAIClient("http://127.0.0.1:1", "completions", GENERATION, clock)
    )
    async with Turns() as turns:
        await client.prepare(tuple(BUILDER.token_ids([Segment("long", 190_000)])), 4)
    await client.close()
    assert turns.count > 50


class NotingClient(OpenAIClient):
    """A client that notes what it builds and sends. `most_ready` requests were built and not yet sent at most."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "completions", GENERATION, MonotonicClock())
        self.events: list[str] = []
        self.most_ready = 0

    async def prepare(self, prompt: Prompt, max_tokens: int) -> Send:
        send = await super().prepare(prompt, max_tokens)
        self._note("built")
        return partial(self._note_and_send, send)

    async def _note_and_send(self, send: Send, answer: Answer) -> None:
        self._note("sent")
        await send(answer)

    def _note(self, event: str) -> None:
        self.events.append(event)
        counts = Counter(self.events)
        self.most_ready = max(self.most_ready, counts["built"] - counts["sent"])


async def test_requests_are_built_before_their_time_comes() -> None:
    requests = random_requests(4, Lengths(8, 8), Lengths(4, 4), seed=1)
    async with answering((PIECE, LAST, USAGE, DONE)) as url:
        client = NotingClient(url)
        load = Load(client, BUILDER, MonotonicClock())
        await load.run(arriving(requests, itertools.repeat(0.05)))
        await client.close()
    assert client.events == ["built"] * 4 + ["sent"] * 4
    assert all(record.failure is None for record in load.records)


@pytest.mark.parametrize(
    ("max_concurrency", "max_tokens", "expected"),
    [(None, 10**6, MAX_READY + 20), (MAX_READY + 8, 10**6, MAX_READY + 8), (None, 8 * (MAX_READY + 3), MAX_READY + 3)],
)
async def test_requests_of_the_beginning_are_all_built_before_it_if_they_fit(
    max_concurrency: int | None, max_tokens: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the last ones of a few hundred would be sent late, for which this client alone is to blame."""
    monkeypatch.setattr(load_module, "_MAX_TOKENS_AT_ONCE", max_tokens)
    requests = random_requests(MAX_READY + 20, Lengths(8, 8), Lengths(4, 4), seed=1)
    async with answering((PIECE, LAST, USAGE, DONE)) as url:
        client = NotingClient(url)
        load = Load(client, BUILDER, MonotonicClock(), max_concurrency=max_concurrency)
        await load.run(arriving(requests, itertools.repeat(0.0)))
        await client.close()
    assert client.events[:expected] == ["built"] * expected and client.events[expected] == "sent"
    assert len(load.records) == MAX_READY + 20


async def test_only_so_many_requests_are_built_ahead() -> None:
    count = MAX_READY + 20
    requests = random_requests(count, Lengths(8, 8), Lengths(4, 4), seed=1)
    async with answering((PIECE, LAST, USAGE, DONE)) as url:
        client = NotingClient(url)
        load = Load(client, BUILDER, MonotonicClock(), max_concurrency=1)
        await load.run(arriving(requests, itertools.repeat(0.0)))
        await client.close()
    assert client.most_ready == MAX_READY
    assert [record.index for record in load.records] == list(range(count))
