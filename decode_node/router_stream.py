"""The messages to one router. Events of one turn of the loop travel together, and so do those that are sent while
a message is being written. Tokens of one output are one event, unless an event of another kind comes between them for
the same request or they are many (`_EVENT_TOKENS`).

A router with many streams may be slower for a while than the steps. A request's events up to its first tokens
therefore overtake the tokens of requests that have had some: its client waits to see that anything happens, and theirs
have what they read.

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
from kvrelay.node.message_parts import parts
from kvrelay.v1 import common_pb2
from kvrelay.v1 import decode_node_pb2 as pb

_EVENT_TOKENS = 1024  # with 20 log-probabilities each about 160 KiB


class _Lane:
    """Events that wait to be sent, in order."""

    def __init__(self) -> None:
        self.update = pb.DecodeUpdate()
        # Of `update`, by request and output: the events that further tokens are added to.
        self._outputs: dict[str, dict[int, common_pb2.TokenOutput]] = {}

    def add(self, event: pb.DecodeEvent) -> None:
        self.update.events.append(event)
        self._outputs.pop(event.request_id, None)

    def add_output(self, request_id: str, output: TokenOutput) -> None:
        outputs = self._outputs.setdefault(request_id, {})
        tokens = outputs.get(output.index)
        if tokens is None or len(tokens.token_ids) >= _EVENT_TOKENS:
            tokens = outputs[output.index] = self.update.events.add(request_id=request_id).tokens
        fill_output(tokens, output)


class RouterStream:
    """The stream to one router, and its requests, which end with it."""

    def __init__(self) -> None:
        self._has_streamed: dict[str, bool] = {}  # by request: whether a message with tokens of it was taken
        self._beginning = _Lane()
        self._streaming = _Lane()  # of requests that have streamed
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def request_ids(self) -> list[str]:
        return list(self._has_streamed)

    def begin(self, request_id: str) -> None:
        self._has_streamed[request_id] = False

    def end(self, request_id: str) -> None:
        """Ends a request, after its last event was sent."""
        del self._has_streamed[request_id]

    def send(self, event: pb.DecodeEvent) -> None:
        self._lane_of(event.request_id).add(event)
        self._wake.set()

    def send_output(self, request_id: str, output: TokenOutput) -> None:
        """Adds tokens directly to the next message. Runs for every token, while the engine waits for the thread."""
        self._lane_of(request_id).add_output(request_id, output)
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
            for first in self._take_beginning():
                yield first
            taken, self._streaming = self._streaming, _Lane()
            for part in parts(taken.update):
                for first in self._take_beginning():
                    yield first
                yield part
            if self._closed and not self._beginning.update.events and not self._streaming.update.events:
                return

    def _lane_of(self, request_id: str) -> _Lane:
        return self._streaming if self._has_streamed.get(request_id) else self._beginning

    def _take_beginning(self) -> Iterator[pb.DecodeUpdate]:
        """Takes what waits of the beginnings, not what comes while it is sent: other tokens are next."""
        if self._beginning.update.events:
            taken, self._beginning = self._beginning, _Lane()
            for event in taken.update.events:
                if event.HasField("tokens") and event.request_id in self._has_streamed:
                    self._has_streamed[event.request_id] = True
            yield from parts(taken.update)
