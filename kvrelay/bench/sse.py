"""Server-sent events, parsed from bytes that arrive in any pieces.

Invariant: the events are the same however the bytes are cut.
"""

_MOST_BYTES = 8 << 20  # of an event; servers send a token or a whole answer in one


class SseParser:
    """A parser that gives the data of each event and drops ids, comments, and names other than that of an error."""

    __slots__ = ("_rest", "error")

    def __init__(self) -> None:
        self._rest = b""
        self.error: bytes | None = None  # the data of an event named error, which `feed` leaves out

    @property
    def rest(self) -> bytes:
        """Returns the bytes that belong to no complete event."""
        return self._rest

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of the events that these bytes complete. Raises ValueError if an event does not end."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > _MOST_BYTES:
            raise ValueError(f"an event has more than {_MOST_BYTES >> 20} MiB")
        return [payload for event in events if (payload := self._payload(event))]

    def _payload(self, event: bytes) -> bytes:
        if event.startswith(b"data:") and b"\n" not in event:  # nearly always
            return event[5:].removeprefix(b" ")
        fields = [line.partition(b":") for line in event.split(b"\n")]
        data = b"\n".join(value.removeprefix(b" ") for name, _, value in fields if name == b"data")
        if any(name == b"event" and value.strip() == b"error" for name, _, value in fields):
            self.error, data = data, b""
        return data
