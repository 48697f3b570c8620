"""What can happen to the KV of a node between its pool and its peers, in clusters of real nodes in one process."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kv_connector.base import FetchOutcome, FetchOutcomes, KVConnector
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.node.node import Node


class Interference:
    """A layer before a node's connector (shared memory). `published` counts blocks. With `corrupt`, a byte of every
    block is flipped in the pool as soon as it is published. While `open` is not set, nothing is published. `store` is
    shared by all nodes that are given the same one: publishing writes to it, and a fetch without a source reads it."""

    def __init__(self, node: Node, *, corrupt: bool = False, store: dict[BlockHash, bytes] | None = None) -> None:
        self.published = 0
        self.open = asyncio.Event()
        self.open.set()
        self._connector: Any = node.connector
        self._corrupt = corrupt
        self._store = store
        self.has_store = store is not None
        node.connector = self._installed_in(node)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        await self.open.wait()
        await self._connector.publish(blocks)
        for block in blocks:
            row = self._row(block)
            if self._store is not None:
                self._store[block.block_hash] = row.tobytes()
            if self._corrupt:
                row[7] ^= 1
        self.published += len(blocks)

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        if source is not None or self._store is None:
            result: FetchOutcomes = await self._connector.fetch(source, blocks, timeout=timeout)
            return result
        found = [self._store.get(block.block_hash) for block in blocks]
        for block, payload in zip(blocks, found, strict=True):
            if payload is not None:
                self._row(block)[:] = memoryview(payload)
        return tuple(FetchOutcome.MISSING if one is None else FetchOutcome.FETCHED for one in found)

    async def has_published(self, num_blocks: int) -> None:
        async with asyncio.timeout(20.0):
            while self.published < num_blocks:
                await asyncio.sleep(0.002)

    def _row(self, block: NamedBlock) -> Any:
        return self._connector.tiers[0]._require().pool.rows[block.block_id]

    def _installed_in(self, node: Node) -> KVConnector:
        connector: Any = self
        node._publisher._connector = connector
        node._reception = replace(node._reception, connector=connector)
        return connector  # type: ignore[no-any-return]
