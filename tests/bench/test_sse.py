"""Server-sent events, however the bytes are cut."""

import random

import pytest

from kvrelay.bench.sse import SseParser

EVENTS = [b'{"a":1}', "naïve ∞".encode(), b"[DONE]"]
STREAM = b"".join(b"data: %s\n\n" % event for event in EVENTS)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_any_cut_gives_the_same_events(newline: bytes) -> None:
    stream = STREAM.replace(b"\n", newline)
    for cut in range(len(stream) + 1):
        parser = SseParser()
        assert parser.feed(stream[:cut]) + parser.feed(stream[cut:]) == EVENTS


def test_random_pieces_give_the_same_events() -> None:
    draw = random.Random(1)
    for _ in range(20):
        parser, found, rest = SseParser(), list[bytes](), STREAM
        while rest:
            length = draw.randint(1, 5)
            found += parser.feed(rest[:length])
            rest = rest[length:]
        assert found == EVENTS


def test_comments_and_names_are_dropped_and_lines_joined() -> None:
    parser = SseParser()
    assert parser.feed(b": ping\n\nevent: x\ndata: one\ndata:two\nid: 3\n\ndata:three\n\n") == [b"one\ntwo", b"three"]


def test_an_event_that_is_named_an_error_is_told_from_all_others() -> None:
    parser = SseParser()
    assert parser.feed(b"event: erroneous\ndata: one\n\n") == [b"one"] and parser.error is None
    assert parser.feed(b'event:error\ndata: {"a":\ndata: 1}\n\ndata: two\n\n') == [b"two"]
    assert parser.error == b'{"a":\n1}'


def test_an_incomplete_event_is_kept_back() -> None:
    parser = SseParser()
    assert parser.feed(b"data: half\n") == []
    assert parser.feed(b"\n") == [b"half"]


def test_an_event_that_does_not_end_is_given_up() -> None:
    """Each piece would take longer than the one before, while other streams wait."""
    parser = SseParser()
    assert parser.feed(b"data: one\n\n" + b"x" * (8 << 20)) == [b"one"]
    with pytest.raises(ValueError, match="an event has more than 8 MiB"):
        parser.feed(b"x")
