"""The messages to one router. Events of one turn of the loop travel together, and so do those that are sent while a
message is being written.

Invariant: everything sent before `close` is delivered before the stream ends, in the order in which it was sent.
"""

import asyncio
from collections.abc import AsyncIterator

from kvrelay.core.errors import KVRelayError
from kvrelay.core.rpc.errors import rich_status
from kvrelay.node.message_parts import parts
from kvrelay.v1 import prefill_node_pb2 as pb


class RouterStream:
    """The stream to one router, and the requests of which it will have more events."""

    def __init__(self) -> None:
        self.request_ids: set[str] = set()
        self._update = pb.PrefillUpdate()
        self._wake = asyncio.Event()
        self._closed = False

    def send(self, event: pb.PrefillEvent) -> None:
        self._update.events.append(event)
        self._wake.set()

    def send_failure(self, request_id: str, error: KVRelayError) -> None:
        failed = pb.PrefillFailed(status=rich_status(error).SerializeToString())
        self.send(pb.PrefillEvent(request_id=request_id, failed=failed))

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def updates(self) -> AsyncIterator[pb.PrefillUpdate]:
        """Yields messages until closed, and before it ends everything that was sent before that."""
        while not self._closed or self._update.events:
            await self._wake.wait()
            self._wake.clear()
            taken, self._update = self._update, pb.PrefillUpdate()
            for part in parts(taken):
                yield part
