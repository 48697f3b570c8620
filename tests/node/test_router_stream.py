"""One message to a router has one event per output, and a request's events in the order in which they were sent."""

from decode_node.router_stream import RouterStream
from kvrelay.core.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.wire import output_from_wire
from kvrelay.v1 import decode_node_pb2 as pb


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


async def test_tokens_never_overtake_another_event() -> None:
    stream = RouterStream()
    stream.send_output("a", TokenOutput(0, (5,)))
    stream.send(pb.DecodeEvent(request_id="a", kv_missing=pb.KVMissing(num_missing_tokens=16)))
    stream.send_output("a", TokenOutput(0, (6,)))
    assert [event.WhichOneof("event") for event in await events_of(stream)] == ["tokens", "kv_missing", "tokens"]


async def test_a_message_that_has_left_is_not_added_to() -> None:
    stream = RouterStream()
    stream.send_output("a", TokenOutput(0, (5,)))
    first = await events_of(stream)
    stream.send_output("a", TokenOutput(0, (6,)))
    second = await events_of(stream)
    assert [list(event.tokens.token_ids) for event in (*first, *second)] == [[5], [6]]
