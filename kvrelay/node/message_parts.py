"""The messages that take events of requests to a router."""

from collections.abc import Iterator
from typing import TypeVar

from kvrelay.core.rpc.chunks import MESSAGE_BYTES, MESSAGE_ITEMS, chunks
from kvrelay.v1 import decode_node_pb2, prefill_node_pb2

_Update = TypeVar("_Update", decode_node_pb2.DecodeUpdate, prefill_node_pb2.PrefillUpdate)


def parts(update: _Update) -> Iterator[_Update]:
    """Splits a message between events if it is too large."""
    if 0 < len(update.events) <= MESSAGE_ITEMS and update.ByteSize() <= MESSAGE_BYTES:
        yield update
        return
    for chunk in chunks(update.events):
        yield type(update)(events=chunk)
