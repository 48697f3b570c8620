"""uvicorn's HTTP parser, with an end to what is not a body.

httptools puts no bound on request lines, header lines, chunk sizes or trailers. Invariant: of one request no more of
them is kept than `MAX_HEAD_BYTES`, what came in the same read, and as much again as its body has.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 and closes, or only closes once there is a body and perhaps a response."""

    _num_head_bytes = 0
    _num_body_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes <= MAX_HEAD_BYTES + self._num_body_bytes or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response(f"Request line and headers may have {MAX_HEAD_BYTES} bytes.")
        else:
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = self._num_body_bytes = 0
        super().on_message_complete()
