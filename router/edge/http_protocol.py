"""uvicorn's HTTP parser, with a limit on what is not part of a body, and with a way to drop a connection.

httptools limits neither request lines and header lines nor chunk sizes and trailers. Invariant: of one request, at most
`MAX_HEAD_BYTES` of them are kept, plus what came in the same read and as many bytes as its body has.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
# Where an application finds, in a request's `state`, the function that drops the connection with all that it buffers.
ABORT = "kvrelay.abort"


class BoundedHttp(HttpToolsProtocol):
    """An HTTP connection that answers 400 and closes when a request exceeds the limit, or only closes if the request is
    already being answered."""

    _num_head_bytes = 0
    _num_body_bytes = 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][ABORT] = self.transport.abort

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
