"""How many events of requests travel in one message to a router.

A router that is slow for a while must not get one message that gRPC refuses (`MAX_MESSAGE_BYTES`), nor one that keeps
its loop for long. Nor can anything overtake the events of a message.
"""

from collections.abc import Iterator
from typing import TypeVar

from kvrelay.v1 import decode_node_pb2, prefill_node_pb2

_MESSAGE_BYTES = 4 * 1024 * 1024
_MESSAGE_EVENTS = 128

_Update = TypeVar("_Update", decode_node_pb2.DecodeUpdate, prefill_node_pb2.PrefillUpdate)


def parts(update: _Update) -> Iterator[_Update]:
    """Splits a message between events, so that no part has more than `_MESSAGE_EVENTS` or, but for one of a single
    event, is larger than `_MESSAGE_BYTES`."""
    if 0 < len(update.events) <= _MESSAGE_EVENTS and update.ByteSize() <= _MESSAGE_BYTES:
        yield update
        return
    part, num_bytes = type(update)(), 0
    for event in update.events:
        size = event.ByteSize()
        if part.events and (num_bytes + size > _MESSAGE_BYTES or len(part.events) == _MESSAGE_EVENTS):
            yield part
            part, num_bytes = type(update)(), 0
        part.events.append(event)
        num_bytes += size
    if part.events:
        yield part
