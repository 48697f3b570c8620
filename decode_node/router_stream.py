"""The messages to one router. Events of one turn of the loop travel in one message, and so do those that are sent while
the message before is being written. Tokens of one output are one event, unless an event of another kind comes
between them for the same request or they are many (`_EVENT_TOKENS`).

Invariant: everything sent before `close` is delivered before the stream ends, a request's events in the order in which
they were sent.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

from kvrelay.core.errors import KVRelayError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.node_report import FetchReport
from kvrelay.core.rpc.errors import rich_status
from kvrelay.core.rpc.wire import fetch_report_to_wire, fill_output, prompt_logprobs_to_wire
from kvrelay.engine.step_result import PromptOutput
from kvrelay.v1 import common_pb2
from kvrelay.v1 import decode_node_pb2 as pb

# A router that is slow for a while must not get one message that gRPC refuses (`MAX_MESSAGE_BYTES`), nor one that keeps
# its loop for long.
_MESSAGE_BYTES = 4 * 1024 * 1024
_EVENT_TOKENS = 1024  # with 20 log-probabilities each about 160 KiB


class RouterStream:
    """The stream to one router. `request_ids`: the requests that end with it."""

    def __init__(self) -> None:
        self.request_ids: set[str] = set()
        self._update = pb.DecodeUpdate()
        # Of `_update`, by request and output: the events that further tokens are added to.
        self._outputs: dict[str, dict[int, common_pb2.TokenOutput]] = {}
        self._wake = asyncio.Event()
        self._closed = False

    def send(self, event: pb.DecodeEvent) -> None:
        self._update.events.append(event)
        self._outputs.pop(event.request_id, None)
        self._wake.set()

    def send_output(self, request_id: str, output: TokenOutput) -> None:
        """Adds tokens directly to the next message. Runs for every token, while the engine waits for the thread."""
        outputs = self._outputs.setdefault(request_id, {})
        tokens = outputs.get(output.index)
        if tokens is None or len(tokens.token_ids) >= _EVENT_TOKENS:
            tokens = outputs[output.index] = self._update.events.add(request_id=request_id).tokens
        fill_output(tokens, output)
        self._wake.set()

    def send_prompt(self, prompt: PromptOutput, fetches: FetchReport, *, with_logprobs: bool) -> None:
        """Reports a prompt that was computed here after `fetches`, before its first token. Requested log-probabilities
        are sent even if there are none, as for a prompt of one token."""
        computed = pb.PromptComputed(
            num_cached_tokens=prompt.num_cached_tokens,
            fetches=fetch_report_to_wire(fetches),
        )
        self.send(pb.DecodeEvent(request_id=prompt.request_id, prompt_computed=computed))
        if with_logprobs:
            logprobs = prompt_logprobs_to_wire(prompt.prompt_logprobs)
            self.send(pb.DecodeEvent(request_id=prompt.request_id, prompt_logprobs=logprobs))

    def send_failure(self, request_id: str, error: KVRelayError) -> None:
        failed = pb.DecodeFailed(status=rich_status(error).SerializeToString())
        self.send(pb.DecodeEvent(request_id=request_id, failed=failed))

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def updates(self) -> AsyncIterator[pb.DecodeUpdate]:
        """Yields messages until closed, and before it ends everything that was sent before that."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            update, self._update = self._update, pb.DecodeUpdate()
            self._outputs.clear()
            if update.events:
                for part in _parts(update):
                    yield part
            if self._closed and not self._update.events:
                return


def _parts(update: pb.DecodeUpdate) -> Iterator[pb.DecodeUpdate]:
    """Splits a message between events, so that no part but one of a single event is larger than `_MESSAGE_BYTES`."""
    if update.ByteSize() <= _MESSAGE_BYTES:
        yield update
        return
    part, num_bytes = pb.DecodeUpdate(), 0
    for event in update.events:
        size = event.ByteSize()
        if part.events and num_bytes + size > _MESSAGE_BYTES:
            yield part
            part, num_bytes = pb.DecodeUpdate(), 0
        part.events.append(event)
        num_bytes += size
    yield part
