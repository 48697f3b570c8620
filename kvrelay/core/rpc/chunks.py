"""How much travels in one message of a stream.

A reader that is slow for a while must not get one message that gRPC refuses (`MAX_MESSAGE_BYTES`), nor one that keeps
its loop for long. Nor can anything overtake what is in a message.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

MESSAGE_BYTES = 4 * 1024 * 1024
MESSAGE_ITEMS = 128


class _Item(Protocol):
    """A message that travels in another one."""

    def ByteSize(self) -> int: ...


_ItemT = TypeVar("_ItemT", bound=_Item)


def chunks(items: Iterable[_ItemT]) -> Iterator[list[_ItemT]]:
    """Splits `items`, so that no chunk has more than `MESSAGE_ITEMS` or, but for one of a single item, is larger than
    `MESSAGE_BYTES`."""
    chunk: list[_ItemT] = []
    num_bytes = 0
    for item in items:
        size = item.ByteSize()
        if chunk and (num_bytes + size > MESSAGE_BYTES or len(chunk) == MESSAGE_ITEMS):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(item)
        num_bytes += size
    if chunk:
        yield chunk
