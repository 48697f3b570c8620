"""Holders of a request's blocks in one process: each can lose blocks, corrupt them, hang; one may be a shared store."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from kv_connector.base import FetchOutcome, FetchOutcomes
from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.errors import KVError
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.engine.step_result import Reservation
from tests.node.fake_node import LAYOUT

_NUM_BLOCKS = 16


class LadderConnector(InProcessConnector):
    """The reader's connector. Fetches from a node in `hung` end only with their timeout, those from a node in `broken`
    raise; those without a source read from `store`. `fetches` records every fetch, in order."""

    def __init__(self, hub: InProcessHub) -> None:
        super().__init__(hub)
        self.hung: set[str] = set()
        self.broken: set[str] = set()
        self.store: KVSource | None = None
        self.fetches: list[tuple[str, int]] = []  # node id or "" and number of blocks
        self.timeouts: list[float] = []

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        self.fetches.append(("" if source is None else source.node_id, len(blocks)))
        self.timeouts.append(timeout)
        if source is not None and source.node_id in self.broken:
            raise KVError("told to fail")
        if source is not None and source.node_id in self.hung:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await asyncio.Event().wait()
            return (FetchOutcome.FAILED,) * len(blocks)
        return await super().fetch(source or self.store, blocks, timeout=timeout)


class Holder:
    """A node of which only the connector exists. It holds the first blocks that a reservation misses."""

    def __init__(self, hub: InProcessHub, node_id: str) -> None:
        self._connector = InProcessConnector(hub)
        self._buffer = self._connector.allocate(LAYOUT, _NUM_BLOCKS, node_id=node_id, epoch=1)
        self.source = KVSource(node_id, 1, self._connector.endpoint)

    async def hold(self, reservation: Reservation, num_blocks: int) -> None:
        blocks = []
        for index, missing in enumerate(reservation.missing[:num_blocks]):
            self.payload(index)[:] = content(index)
            blocks.append(NamedBlock(index, missing.block_hash, missing.num_tokens))
        await self._connector.publish(blocks)

    def lose(self, *indices: int) -> None:
        self._connector.retract(indices)

    def corrupt(self, index: int) -> None:
        self.payload(index)[5] ^= 1

    def payload(self, index: int) -> memoryview:
        return self._buffer.memory[index * LAYOUT.block_bytes : (index + 1) * LAYOUT.block_bytes]

    async def close(self) -> None:
        await self._connector.close()


def content(index: int) -> bytes:
    return bytes([index + 1]) * LAYOUT.block_bytes
