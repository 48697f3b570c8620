"""What waits for a router has one event per output, and a request's events leave in their order."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc

from decode_node.router_stream import RouterStream
from decode_node.service import DecodeService
from kvrelay.core.errors import ContextLengthError, NotFiniteError, NotTakenError
from kvrelay.core.generation.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.rpc.connections import serve_insecure, server_options
from kvrelay.core.rpc.wire import output_from_wire
from kvrelay.v1 import decode_node_pb2 as pb
from kvrelay.v1 import decode_node_pb2_grpc
from router.nodes.kv_index import KVIndex
from router.nodes.registry import Registry
from tests.node.fake_node import StepwiseRunner, make_node, serving
from tests.node.router_end import Router, admit, failure


async def events_of(stream: RouterStream) -> list[pb.DecodeEvent]:
    """Returns the events of the next message."""
    update = await anext(aiter(stream.updates()))
    return list(update.events)


def logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, ((token_id, -0.5),))


async def test_tokens_of_an_output_are_one_event() -> None:
    stream = RouterStream()
    for token_id in (5, 6):
        for request_id, index in (("a", 0), ("a", 1), ("b", 0)):
            stream.send_output(request_id, TokenOutput(index, (token_id,), (logprobs(token_id),)))
    stream.send_output("a", TokenOutput(1, (7,), (logprobs(7),), FinishReason.STOP, stop_token_id=7))
    found = [(event.request_id, output_from_wire(event.tokens)) for event in await events_of(stream)]
    both = (logprobs(5), logprobs(6))
    assert found == [
        ("a", TokenOutput(0, (5, 6), both)),
        ("a", TokenOutput(1, (5, 6, 7), (*both, logprobs(7)), FinishReason.STOP, stop_token_id=7)),
        ("b", TokenOutput(0, (5, 6), both)),
    ]


async def test_tokens_never_overtake_another_event_of_their_request() -> None:
    """Those of other requests do not keep them from travelling together."""
    stream = RouterStream()
    stream.send_output("a", TokenOutput(0, (5,)))
    stream.send_output("b", TokenOutput(0, (8,)))
    stream.send(pb.DecodeEvent(request_id="a", kv_missing=pb.KVMissing(num_missing_tokens=16)))
    stream.send_output("a", TokenOutput(0, (6,)))
    stream.send_output("b", TokenOutput(0, (9,)))
    stream.send_output("a", TokenOutput(0, (7,)))
    found = [(event.request_id, list(event.tokens.token_ids)) for event in await events_of(stream)]
    assert found == [("a", [5]), ("b", [8, 9]), ("a", []), ("a", [6, 7])]


async def test_what_is_sent_while_the_last_message_is_written_is_delivered_before_the_end() -> None:
    stream = RouterStream()
    stream.send_output("a", TokenOutput(0, (5,)))
    stream.close()
    tokens: list[list[int]] = []
    async with asyncio.timeout(10.0):
        async for update in stream.updates():
            if not tokens:
                stream.send_output("a", TokenOutput(0, (6,)))
            tokens += [list(event.tokens.token_ids) for event in update.events]
    assert tokens == [[5], [6]]


async def test_what_a_slow_router_has_not_taken_comes_in_messages_of_bounded_size() -> None:
    stream, tokens = RouterStream(), tuple(range(100))
    for _ in range(60):
        for number in range(200):
            stream.send_output(f"request-{number}", TokenOutput(0, tokens, tuple(map(logprobs, tokens))))
    stream.close()
    sizes, received = [], dict.fromkeys((f"request-{number}" for number in range(200)), 0)
    async with asyncio.timeout(10.0):
        async for update in stream.updates():
            sizes.append(update.ByteSize())
            for event in update.events:
                assert list(event.tokens.token_ids[:100]) == list(tokens)
                assert len(event.tokens.token_ids) < 1200, "an event is not split any more"
                received[event.request_id] += len(event.tokens.token_ids)
    assert len(sizes) > 1 and max(sizes) < 5 * 2**20
    assert set(received.values()) == {6000}


async def test_first_tokens_overtake_those_of_requests_that_have_streamed() -> None:
    """Else they would come behind a thousand streams whose tokens a slow router has still to read. A request's own
    events stay in their order."""
    stream = RouterStream()
    for number in range(300):
        stream.begin(str(number))
        stream.send_output(str(number), TokenOutput(0, (5,)))
    updates = aiter(stream.updates())
    for _ in range(3):
        await anext(updates)
    for number in range(300):
        stream.send_output(str(number), TokenOutput(0, (6,)))
    overtaken = await anext(updates)
    stream.begin("new")
    stream.send(pb.DecodeEvent(request_id="new", prompt_computed=pb.PromptComputed()))
    stream.send_output("new", TokenOutput(0, (7,)))
    first = await anext(updates)
    stream.send_output("new", TokenOutput(0, (8,)))
    stream.send_failure("new", NotTakenError("not now"))
    stream.end("new")
    stream.close()
    rest = [event async for update in updates for event in update.events]
    assert [len(overtaken.events), len(first.events)] == [128, 2]
    assert [event.request_id for event in first.events] == ["new", "new"]
    assert [event.WhichOneof("event") for event in rest if event.request_id == "new"] == ["tokens", "failed"]
    streamed = [event.request_id for event in (*overtaken.events, *rest) if event.request_id != "new"]
    assert streamed == [str(number) for number in range(300)]
    assert "new" not in stream.request_ids


async def test_first_tokens_that_keep_coming_do_not_hold_back_other_tokens() -> None:
    """Each of these requests ends with its first token."""
    stream = RouterStream()
    stream.begin("old")
    stream.send_output("old", TokenOutput(0, (5,)))
    updates = aiter(stream.updates())
    await anext(updates)
    messages: list[list[str]] = []
    for number in range(100):
        stream.begin(str(number))
        stream.send_output(str(number), TokenOutput(0, (5,)))
        stream.end(str(number))
        stream.send_output("old", TokenOutput(0, (6,)))
        messages.append([event.request_id for event in (await anext(updates)).events])
    assert messages.count(["old"]) >= 30


async def test_a_failure_does_not_overtake_tokens_of_its_request() -> None:
    runner = StepwiseRunner()
    async with serving(DecodeService, node := make_node(runner)) as service:
        router = Router(service)
        runner.steps.release(2)  # the prompt of 20 tokens takes two steps
        router.send(admit("a", local_prefill=True))
        while not (await router.event()).HasField("tokens"):
            pass
        service._send_output("a", TokenOutput(0, (7,)))
        service._give_up("a", NotTakenError("not now"))
        tokens: list[int] = []
        while (event := await router.event()).HasField("tokens"):
            tokens += event.tokens.token_ids
        assert tokens == [7]
        assert isinstance(failure(event), NotTakenError)
        runner.steps.release(10)
        await router.close()
        await node.check_idle()


async def test_a_message_has_no_more_than_so_many_events() -> None:
    stream = RouterStream()
    for number in range(1000):
        stream.send_output(str(number), TokenOutput(0, (5,)))
    stream.close()
    sizes = [len(update.events) async for update in stream.updates()]
    assert max(sizes) == 128 and sum(sizes) == 1000


async def test_closing_a_stream_ends_it_without_another_message() -> None:
    stream = RouterStream()
    reading = asyncio.ensure_future(anext(aiter(stream.updates()), None))
    await asyncio.sleep(0)
    stream.close()
    assert await asyncio.wait_for(reading, 10.0) is None


async def test_a_failure_keeps_its_class_and_the_field_that_is_wrong() -> None:
    stream = RouterStream()
    sent = [ContextLengthError("too long", field="prompt"), NotFiniteError("no logits"), NotTakenError("not now")]
    for error in sent:
        stream.send_failure("a", error)
    found = [failure(event) for event in await events_of(stream)]
    assert list(map(repr, found)) == list(map(repr, sent))
    assert [getattr(error, "field", None) for error in found] == ["prompt", None, None]


async def test_a_message_that_has_left_is_not_added_to() -> None:
    stream = RouterStream()
    stream.send_output("a", TokenOutput(0, (5,)))
    first = await events_of(stream)
    stream.send_output("a", TokenOutput(0, (6,)))
    second = await events_of(stream)
    assert [list(event.tokens.token_ids) for event in (*first, *second)] == [[5], [6]]


class CountingNode(decode_node_pb2_grpc.DecodeNodeServicer):
    """A decode node that makes so many tokens for each of 64 requests, one in each turn of its loop."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.has_made_all = asyncio.Event()

    async def Serve(self, request_iterator: object, context: object) -> AsyncIterator[pb.DecodeUpdate]:
        stream = RouterStream()
        making = asyncio.create_task(self._make(stream))
        async for update in stream.updates():
            yield update
        await making

    async def _make(self, stream: RouterStream) -> None:
        for token_id in range(self._num_tokens):
            for number in range(64):
                stream.send_output(f"cmpl-{number:032}", TokenOutput(0, (token_id,)))
            await asyncio.sleep(0)
        stream.close()
        self.has_made_all.set()


async def test_a_router_that_was_busy_does_not_read_every_step_that_it_has_missed() -> None:
    """It would lag behind for ever if it takes longer for a message than a step does."""
    node = CountingNode(2000)
    server = grpc.aio.server(options=server_options())
    decode_node_pb2_grpc.add_DecodeNodeServicer_to_server(node, server)
    port = await serve_insecure(server, "127.0.0.1", 0)
    registry = Registry([], [f"127.0.0.1:{port}"], KVIndex(1), timeout=5.0, silence=5.0)  # has the router's channels
    channel = registry.decode[0].channel
    stub = cast("decode_node_pb2_grpc.DecodeNodeAsyncStub", decode_node_pb2_grpc.DecodeNodeStub(channel))
    received: dict[str, list[int]] = {}
    num_messages = 0
    try:
        async with asyncio.timeout(60.0):
            async for update in stub.Serve():
                await node.has_made_all.wait()
                num_messages += 1
                for event in update.events:
                    received.setdefault(event.request_id, []).extend(event.tokens.token_ids)
    finally:
        await registry.close()
        await server.stop(None)
    assert num_messages < 40
    assert list(received.values()) == [list(range(2000))] * 64
