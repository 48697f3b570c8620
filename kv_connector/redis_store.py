"""Blocks in Redis: the fallback between hosts, and KV that outlives its node.

One value per block, header then payload, under `<prefix>:<block hash in hex>` with a TTL. Any node may have written
it: the name says
what it must be and the digest whether it still is, so the epoch in the header is information only and `Source` is
ignored.
Invariant: every round trip has a deadline, and a value enters the pool only after it passed verification, in one
step of the loop.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kv_connector.base import Block, FetchOutcome, FetchResult, PoolBuffer, Source
from kv_connector.header import HEADER_BYTES, BlockHeader, Mismatch, payload_digest
from kv_connector.pool import LocalPool, Slices
from kv_connector.settings import RedisSettings
from kv_connector.stats import ConnectorStats
from kv_connector.verdict import Verdict, settle
from kvrelay.core.block_hash import BlockHash
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv_layout import KVLayout

_UNREACHABLE = (RedisError, OSError, TimeoutError)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Open:
    """What exists between `allocate` and `close`."""

    client: Redis
    pool: LocalPool
    epoch: int


class RedisConnector:
    """Implements KVConnector. `retract` does nothing: the copies live in Redis and stay true."""

    name = "redis"

    def __init__(self, settings: RedisSettings, *, clock: Clock | None = None) -> None:
        if settings.ttl_seconds < 1 or settings.batch_bytes < 1 or settings.max_connections < 1:
            raise ConfigurationError(
                "redis.ttl_seconds, redis.batch_bytes and redis.max_connections must be at least 1"
            )
        if settings.operation_timeout_seconds <= 0:
            raise ConfigurationError("redis.operation_timeout_seconds must be above 0")
        self.stats = ConnectorStats()
        self._settings = settings
        self._clock: Clock = clock or MonotonicClock()
        self._state: _Open | None = None

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        return {self.name: self.stats}

    def allocate(self, layout: KVLayout, num_blocks: int, *, node_id: str, epoch: int) -> PoolBuffer:
        assert self._state is None, "allocate is called once"
        client = _client(self._settings)
        pool = LocalPool.anonymous(layout, num_blocks)
        self._state = _Open(client, pool, epoch)
        return pool.buffer

    @property
    def endpoint(self) -> str:
        return ""

    async def publish(self, blocks: Sequence[Block]) -> None:
        state = self._require()
        done = 0
        try:
            absent = await self._absent(state.client, blocks)
            done = len(blocks) - len(absent)
            for part in Slices(absent, state.pool.block_bytes, self._settings.batch_bytes):
                done += await self._store(self._require(), part)
        except _UNREACHABLE as error:
            _logger.warning("publishing to Redis failed: %s", type(error).__name__)
        self.stats.failed += len(blocks) - done
        if blocks and done == 0:
            raise KVError(f"none of {len(blocks)} blocks could be published to Redis")

    def retract(self, block_ids: Sequence[int]) -> None:
        return

    async def fetch(self, source: Source | None, blocks: Sequence[Block], *, timeout: float) -> FetchResult:
        started = self._clock.now()
        block_bytes = self._require().pool.block_bytes
        verdicts: list[Verdict] = []
        for part in Slices(blocks, block_bytes, self._settings.batch_bytes):
            remaining = timeout - (self._clock.now() - started)
            if remaining <= 0:
                break
            try:
                verdicts += await self._load(self._require(), part, remaining)
            except _UNREACHABLE as error:
                _logger.warning("fetching from Redis failed: %s", type(error).__name__)
                break
        verdicts += [FetchOutcome.FAILED] * (len(blocks) - len(verdicts))
        seconds = self._clock.now() - started
        return settle(verdicts, stats=self.stats, block_bytes=block_bytes, seconds=seconds, origin="Redis")

    async def close(self) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        try:
            async with asyncio.timeout(self._settings.operation_timeout_seconds):
                await state.client.aclose()
        except _UNREACHABLE as error:
            _logger.info("closing the connection to Redis failed: %s", type(error).__name__)
        finally:
            state.pool.release()

    def _require(self) -> _Open:
        if self._state is None:
            raise KVError("the Redis connector is not allocated, or closed")
        return self._state

    def _key(self, name: BlockHash) -> str:
        return f"{self._settings.key_prefix}:{name.hex()}"

    async def _absent(self, client: Redis, blocks: Sequence[Block]) -> list[Block]:
        """Those that Redis does not hold; the TTL of the others starts again."""
        async with (
            asyncio.timeout(self._settings.operation_timeout_seconds),
            client.pipeline(transaction=False) as pipe,
        ):
            for block in blocks:
                pipe.expire(self._key(block.block_hash), self._settings.ttl_seconds)
            held: list[Any] = await pipe.execute(raise_on_error=False)
        return [block for block, answer in zip(blocks, held, strict=True) if answer not in (1, True)]

    async def _store(self, state: _Open, blocks: Sequence[Block]) -> int:
        """One round of SETs; how many Redis took (it refuses when its memory is full)."""
        async with asyncio.timeout(self._settings.operation_timeout_seconds):
            async with state.client.pipeline(transaction=False) as pipe:
                for block in blocks:
                    # The digest first and the copy second: a block that changes in between fails verification later.
                    header = state.pool.describe(block, state.epoch).encode()
                    value = header + state.pool.rows[block.block_id].tobytes()
                    pipe.set(self._key(block.block_hash), value, ex=self._settings.ttl_seconds)
                answers: list[Any] = await pipe.execute(raise_on_error=False)
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        if refused:
            _logger.warning("Redis refused %d of %d blocks: %s", len(refused), len(blocks), refused[0])
        stored = len(blocks) - len(refused)
        self.stats.blocks_published += stored
        self.stats.bytes_published += stored * state.pool.block_bytes
        return stored

    async def _load(self, state: _Open, blocks: Sequence[Block], timeout: float) -> list[Verdict]:
        """One MGET. Values are verified and copied without giving up the loop, so a cancelled fetch writes nothing
        later.
        """
        async with asyncio.timeout(min(timeout, self._settings.operation_timeout_seconds)):
            values: list[Any] = await state.client.mget([self._key(block.block_hash) for block in blocks])
        if self._state is not state:
            raise KVError("the Redis connector was closed during a fetch")
        verdicts = [_accept(state.pool, block, value) for block, value in zip(blocks, values, strict=True)]
        damaged = [block for block, verdict in zip(blocks, verdicts, strict=True) if verdict is Mismatch.DIGEST]
        if damaged:  # out of the way of the next publisher, who would otherwise find the name taken
            async with asyncio.timeout(min(timeout, self._settings.operation_timeout_seconds)):
                await state.client.unlink(*(self._key(block.block_hash) for block in damaged))
        return verdicts


def _accept(pool: LocalPool, block: Block, value: bytes | None) -> Verdict:
    """Verifies a value and puts its payload into the pool."""
    if value is None:
        return FetchOutcome.MISSING
    if len(value) < HEADER_BYTES:
        return Mismatch.LENGTH
    view = memoryview(value)
    header = BlockHeader.decode(view[:HEADER_BYTES])
    mismatch = header.verify(
        block_hash=block.block_hash,
        layout_digest=pool.layout_digest,
        payload_bytes=pool.block_bytes,
        num_tokens=block.num_tokens,
        epoch=None,
    )
    if mismatch is not None:
        return mismatch
    payload = np.frombuffer(view[HEADER_BYTES:], np.uint8)
    if payload.size != pool.block_bytes:
        return Mismatch.LENGTH
    np.copyto(pool.rows[block.block_id], payload)
    return header.verify_payload(payload_digest(pool.rows[block.block_id].data)) or FetchOutcome.FETCHED


def _client(settings: RedisSettings) -> Redis:
    """A client that connects at its first command. Errors do not repeat the URL: it may hold a password."""
    try:
        connections = BlockingConnectionPool.from_url(
            settings.url,
            max_connections=settings.max_connections,
            timeout=settings.operation_timeout_seconds,
            socket_timeout=settings.operation_timeout_seconds,
            socket_connect_timeout=settings.operation_timeout_seconds,
            retry=Retry(NoBackoff(), 1),  # once: the server may have closed an idle connection
        )
    except ValueError:
        raise ConfigurationError("redis.url is not valid: use redis://, rediss:// or unix://") from None
    return Redis.from_pool(connections)
