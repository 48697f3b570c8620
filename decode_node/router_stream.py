"""What is to be sent to one router: events of one loop turn travel in one message, and so do those that come while
it writes the one before. Tokens of one output are one event of it.

Invariant: everything sent before `close` leaves before the stream ends, a request's events in the order they were sent.
"""

import asyncio
from collections.abc import AsyncIterator

from kvrelay.core.errors import KVRelayError, status_of
from kvrelay.core.node_report import FetchReport
from kvrelay.core.outputs import TokenOutput
from kvrelay.core.wire import fetch_report_to_wire, fill_output, logprobs_to_wire
from kvrelay.engine.request import PromptOutput
from kvrelay.v1 import common_pb2
from kvrelay.v1 import decode_node_pb2 as pb


class RouterStream:
    """`request_ids`: the requests that live and die with it."""

    def __init__(self) -> None:
        self.request_ids: set[str] = set()
        self._update = pb.DecodeUpdate()
        self._outputs: dict[tuple[str, int], common_pb2.TokenOutput] = {}  # the last events of `_update`, by output
        self._wake = asyncio.Event()
        self._closed = False

    def send(self, event: pb.DecodeEvent) -> None:
        self._update.events.append(event)
        self._outputs.clear()
        self._wake.set()

    def send_output(self, request_id: str, output: TokenOutput) -> None:
        """Written where it will leave from: this is for every token, on a thread that the engine waits for."""
        key = request_id, output.index
        tokens = self._outputs.get(key)
        if tokens is None:
            tokens = self._outputs[key] = self._update.events.add(request_id=request_id).tokens
        fill_output(tokens, output)
        self._wake.set()

    def send_prompt(self, prompt: PromptOutput, fetches: FetchReport, *, with_logprobs: bool) -> None:
        """A prompt that was computed here after `fetches`, before its first token. The logprobs of a single token are
        none, and are sent all the same when they were asked for."""
        admitted = pb.Admitted(
            num_cached_tokens=prompt.num_cached_tokens,
            num_fetched_tokens=fetches.num_tokens,
            fetches=fetch_report_to_wire(fetches),
        )
        self.send(pb.DecodeEvent(request_id=prompt.request_id, admitted=admitted))
        if with_logprobs:
            logprobs = pb.PromptLogprobs(logprobs=[logprobs_to_wire(entry) for entry in prompt.prompt_logprobs])
            self.send(pb.DecodeEvent(request_id=prompt.request_id, prompt_logprobs=logprobs))

    def send_failure(self, request_id: str, error: KVRelayError) -> None:
        code = status_of(error).grpc_code.value[0]
        self.send(pb.DecodeEvent(request_id=request_id, failed=pb.DecodeFailed(code=code, message=str(error))))

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def updates(self) -> AsyncIterator[pb.DecodeUpdate]:
        """Ends when closed, after everything that was sent before."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            update, self._update = self._update, pb.DecodeUpdate()
            self._outputs.clear()
            if update.events:
                yield update
            if self._closed and not self._update.events:
                return
