"""The connector that keeps blocks in Redis: the fallback between hosts, and KV that outlives its node.

A block is one value, header then payload, under `<prefix>:<block hash in hex>` with a TTL. Any node may have written
it: the name determines the content and the digest verifies it. So the epoch in the header is information only, and
`KVSource` is ignored.
Invariant: every round trip has a deadline; a server that keeps failing is left alone for a while (`redis_link.py`); a
value is verified and copied into the pool in one turn of the loop; a block that was retracted meanwhile is not stored;
what is discarded is deleted after the SETs under way, which could bring it back.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from redis.exceptions import AuthenticationError, InvalidResponse, ReadOnlyError, ResponseError

from kv_connector.base import AccessDeniedError, FetchOutcome, FetchOutcomes, PoolBuffer
from kv_connector.header import HEADER_BYTES, BlockHeader, Mismatch
from kv_connector.pool import LocalPool, slices
from kv_connector.settings import RedisSettings
from kv_connector.stats import ConnectorStats
from kv_connector.store.backlog import Backlog, Offer
from kv_connector.store.redis_link import UNREACHABLE, CircuitOpenError, RedisLink, answer_of
from kv_connector.verdict import Verdict, Verdicts
from kvrelay.core.breaker import Permit
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import KVError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.outages import Outages

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """The state between `allocate` and `close`. Retractions take no lock: what is sent is a copy, made before the
    generation was last compared."""

    pool: LocalPool
    epoch: int
    backlog: Backlog | None  # only over the pool of another connector
    generations: list[int] = field(init=False)  # per block, grows when it is retracted

    def __post_init__(self) -> None:
        self.generations = [0] * self.pool.buffer.num_blocks

    def stands(self, offer: Offer) -> bool:
        return self.generations[offer.block.block_id] == offer.generation


class RedisConnector:
    """Implements HostConnector. Over its own pool, `publish` returns when Redis has the blocks. Over another
    connector's (`buffer`), it returns at once, and the blocks follow in the background, unpinned."""

    name = "redis"
    has_store = True

    def __init__(self, settings: RedisSettings, *, clock: Clock | None = None) -> None:
        """Raises ConfigurationError for a URL that is not valid; nothing is connected yet."""
        self.stats = ConnectorStats()
        self._settings = settings
        self._clock: Clock = clock or MonotonicClock()
        self._outages = Outages(self._clock.now)
        self._link = RedisLink(settings, self._clock)
        self._failure: Exception | None = None  # that ended the last `_offer`, if one did
        self._writing = asyncio.Lock()  # held while SETs are under way, and while a discarded block is deleted
        self._state: _Open | None = None

    def all_stats(self) -> Mapping[str, ConnectorStats]:
        return {self.name: self.stats}

    def allocate(
        self, layout: KVLayout, num_blocks: int, *, node_id: str, epoch: int, buffer: PoolBuffer | None = None
    ) -> PoolBuffer:
        assert self._state is None, "allocate is called once"
        pool = LocalPool.over(buffer, layout, num_blocks)
        self._state = _Open(pool, epoch, Backlog(self._offer) if buffer is not None else None)
        return pool.buffer

    @property
    def endpoint(self) -> str:
        return ""

    async def publish(self, blocks: Sequence[NamedBlock]) -> None:
        state = self._require()
        offers = [Offer(block, state.generations[block.block_id]) for block in blocks]
        if state.backlog is not None:
            state.backlog.add(offers)
        elif await self._offer(offers) == 0 and blocks:
            if isinstance(self._failure, AuthenticationError):
                server = f"Redis ({self._link.address})"
                raise AccessDeniedError(f"{server} wants another user or password than --redis-url has")
            raise KVError(f"none of {len(blocks)} blocks could be published to Redis")

    def retract(self, block_ids: Sequence[int]) -> None:
        """Drops blocks that wait to be stored. Those in Redis stay, since their names still determine their content,
        unless they are distrusted (`discard`)."""
        state = self._state
        if state is not None:
            for block_id in block_ids:
                state.generations[block_id] += 1

    async def discard(self, names: Sequence[BlockHash]) -> None:
        if self._state is not None and names:
            async with self._writing:  # blocks that wait to be stored are retracted, and never sent
                await self._remove(names, "that may be wrong")

    async def finish_storing(self) -> None:
        if self._state is not None and self._state.backlog is not None:
            await self._state.backlog.emptied()

    async def fetch(self, source: KVSource | None, blocks: Sequence[NamedBlock], *, timeout: float) -> FetchOutcomes:
        verdicts = Verdicts(len(blocks), timeout=timeout, clock=self._clock)
        block_bytes = self._require().pool.block_bytes
        known: dict[NamedBlock, Verdict] = {}
        wanted, is_looked_up = blocks, False
        try:
            while wanted and (left := verdicts.seconds_left) > 0:
                part = next(slices(wanted, block_bytes, self._settings.batch_bytes))
                found = await self._load(self._require(), part, left)
                known.update(zip(part, found, strict=True))
                wanted = wanted[len(part) :]
                left = verdicts.seconds_left
                if wanted and left > 0 and FetchOutcome.MISSING in found and not is_looked_up:
                    known.update(await self._absent(self._require(), wanted, left))
                    wanted, is_looked_up = [block for block in wanted if block not in known], True
        except UNREACHABLE as error:
            if isinstance(error, CircuitOpenError):
                self.stats.skipped += sum(block not in known for block in blocks)
            self._outages.failed("fetching from Redis", "fetching from Redis failed: %s", self._link.described(error))
        else:
            self._outages.succeeded("fetching from Redis")
        verdicts.found = [known.get(block, FetchOutcome.FAILED) for block in blocks]
        return verdicts.settle(None, self.stats, self._outages, block_bytes=block_bytes)

    async def close(self) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        try:
            if state.backlog is not None and (num_dropped := await state.backlog.close()):
                self.stats.lost_unstored += num_dropped
                _logger.warning("%d blocks that waited to be stored in Redis are dropped", num_dropped)
            await self._link.close()
        except UNREACHABLE as error:
            _logger.info("closing the connection to Redis failed: %s", type(error).__name__)
        finally:
            state.pool.release()

    def _require(self) -> _Open:
        if self._state is None:
            raise KVError("the Redis connector is not allocated, or closed")
        return self._state

    def _require_same(self, state: _Open) -> None:
        if self._state is not state:
            raise KVError("the Redis connector was closed meanwhile")

    def _key(self, name: BlockHash) -> str:
        return f"{self._settings.key_prefix}:{name.hex()}"

    # -- storing -----------------------------------------------------------------------------------------------------

    async def _offer(self, offers: Sequence[Offer]) -> int:
        """Stores blocks, except those that have lost their content meanwhile; returns how many Redis has now."""
        state = self._require()
        self._failure = None
        if not offers:
            return 0  # without an exchange, which would count as a success of a server that was sent nothing
        held = lost = 0
        try:
            held, absent = await self._renew(offers)
            for part in slices(absent, state.pool.block_bytes, self._settings.batch_bytes):
                permit = self._link.writes.admit()
                if permit is None:
                    self.stats.skipped += len(offers) - held - lost
                    self._outages.failed("storing in Redis", "Redis is sent no blocks, as it has just refused some")
                    break
                stored, gone = await self._store(state, part, permit)
                held += stored
                lost += gone
        except UNREACHABLE as error:
            if isinstance(error, CircuitOpenError):
                self.stats.skipped += len(offers) - held - lost
            self._failure = error
            self._outages.failed("publishing to Redis", "publishing to Redis failed: %s", self._link.described(error))
        else:
            self._outages.succeeded("publishing to Redis")
        self.stats.lost_unstored += lost
        self.stats.failed += len(offers) - held - lost
        return held

    async def _renew(self, offers: Sequence[Offer]) -> tuple[int, list[Offer]]:
        """Restarts the TTL of the blocks that Redis holds. Returns how many these are, and those that it lacks. A block
        for which it refuses that is among neither: what refuses an EXPIRE refuses as a rule a SET as well."""
        async with self._link.exchange() as client, client.pipeline(transaction=False) as pipe:
            for offer in offers:
                pipe.expire(self._key(offer.block.block_hash), self._settings.ttl_seconds)
            answers: list[Any] = await answer_of(pipe.execute(raise_on_error=False))
        if any(isinstance(answer, Exception) for answer in answers):
            permit = self._link.writes.admit()
            if permit is not None:
                self._note_writes(answers, permit)
        return answers.count(1), [offer for offer, answer in zip(offers, answers, strict=True) if answer == 0]

    async def _store(self, state: _Open, offers: Sequence[Offer], permit: Permit) -> tuple[int, int]:
        """Sends one round of SETs, if any of the blocks has its content yet, and ends `permit` to write. Returns how
        many blocks Redis has stored, and how many were retracted before they were sent. Raises KVError once closed."""
        answers: list[Any] = []
        try:
            async with self._writing:
                self._require_same(state)
                sent = [(offer, value) for offer in offers if (value := _value(state, offer)) is not None]
                if sent:
                    async with self._link.exchange() as client, client.pipeline(transaction=False) as pipe:
                        for offer, value in sent:
                            pipe.set(self._key(offer.block.block_hash), value, ex=self._settings.ttl_seconds)
                        answers = await answer_of(pipe.execute(raise_on_error=False))
        finally:
            refused = self._note_writes(answers, permit)
        stored = len(sent) - refused
        self.stats.count_published(stored, state.pool.block_bytes)
        return stored, len(offers) - len(sent)

    def _note_writes(self, answers: Sequence[object], permit: Permit) -> int:
        """Ends `permit` to write; returns how many commands Redis has refused: it is full, a replica, lacks
        replicas, cannot save, or forbids them. Each is an answer, so the exchange itself has succeeded."""
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        if refused:
            message, why = "Redis refused to write %d of %d blocks: %s", self._link.described(refused[0])
            self._outages.failed("storing in Redis", message, len(refused), len(answers), why)
            if any(isinstance(answer, ReadOnlyError) for answer in refused):
                self._link.renew()
            self._link.writes.failed(permit)
        elif answers:
            self._link.writes.succeeded()
            self._outages.succeeded("storing in Redis")
        else:
            self._link.writes.abandoned(permit)
        return len(refused)

    # -- loading -----------------------------------------------------------------------------------------------------

    async def _absent(self, state: _Open, blocks: Sequence[NamedBlock], timeout: float) -> dict[NamedBlock, Verdict]:
        """Returns MISSING for each of these blocks that Redis does not hold. Takes one exchange, in which a block costs
        a byte at most: when the first blocks of a prompt are missing, those behind would take many to say the same."""
        values = await self._values(state, blocks, 0, timeout)
        return {block: FetchOutcome.MISSING for block, value in zip(blocks, values, strict=True) if _is_absent(value)}

    async def _values(self, state: _Open, blocks: Sequence[NamedBlock], last_offset: int, timeout: float) -> list[Any]:
        """Sends one round of GETRANGEs for the bytes 0 .. `last_offset` and returns the answers, one per block. Raises
        one of UNREACHABLE if none of them says what is under its key."""
        async with self._link.exchange(timeout) as client, client.pipeline(transaction=False) as pipe:
            for block in blocks:
                pipe.getrange(self._key(block.block_hash), 0, last_offset)
            values: list[Any] = await answer_of(pipe.execute(raise_on_error=False))
            if not any(_is_said_of_key(value) for value in values):
                raise next((value for value in values if isinstance(value, Exception)), InvalidResponse("no value"))
        self._require_same(state)
        return values

    async def _load(self, state: _Open, blocks: Sequence[NamedBlock], timeout: float) -> list[Verdict]:
        """Loads blocks in one exchange and returns the verdicts. Asks for one byte more than a block has: a longer
        value, which may be somebody else's, shows by that and costs no more than a block. Values are verified and
        copied within one turn of the loop, so a cancelled fetch writes nothing later."""
        deadline = self._clock.now() + timeout
        values = await self._values(state, blocks, HEADER_BYTES + state.pool.block_bytes, timeout)
        verdicts = [_accept(state.pool, block, value) for block, value in zip(blocks, values, strict=True)]
        damaged = [
            block.block_hash for block, verdict in zip(blocks, verdicts, strict=True) if isinstance(verdict, Mismatch)
        ]
        await self._remove(damaged, "that are damaged", deadline)
        return verdicts

    async def _remove(self, names: Sequence[BlockHash], what: str, deadline: float | None = None) -> None:
        """Deletes values, whose names would otherwise count as held when a node publishes the blocks again. A name
        determines every field that is verified, so no node can use such a value. Two versions of kvrelay with one
        Redis replace each other's values, which does no other harm. `deadline`: when to stop, on our clock."""
        if not names:
            return
        try:
            answer = await self._unlink(names, deadline)
            if isinstance(answer, ReadOnlyError):  # the primary may have this name by now
                self._link.renew()
                answer = await self._unlink(names, deadline)
            failure = answer if isinstance(answer, Exception) else None
        except UNREACHABLE as error:
            failure = error
        if failure is None:
            self._outages.succeeded("deleting from Redis")
        else:
            message = "%d values %s stay in Redis: %s"
            self._outages.failed("deleting from Redis", message, len(names), what, self._link.described(failure))

    async def _unlink(self, names: Sequence[BlockHash], deadline: float | None) -> object:
        """Returns the answer to one UNLINK, which is an error if Redis refuses it. Raises one of UNREACHABLE."""
        timeout = None if deadline is None else max(0.0, deadline - self._clock.now())
        async with self._link.exchange(timeout) as client, client.pipeline(transaction=False) as pipe:
            pipe.unlink(*map(self._key, names))
            answers: list[Any] = await answer_of(pipe.execute(raise_on_error=False))
        return answers[0]


def _value(state: _Open, offer: Offer) -> bytes | None:
    """Returns a copy of header and payload; None when the block was retracted before or while they were read."""
    block = offer.block
    if not state.stands(offer):
        return None
    header = state.pool.describe(block, state.epoch).encode()
    value = header + state.pool.rows[block.block_id].tobytes()
    return value if state.stands(offer) else None


def _is_said_of_key(answer: object) -> bool:
    """Tells whether an answer to GETRANGE says what is under the key, and not that Redis cannot say it."""
    return answer is None or isinstance(answer, bytes) or _is_of_another_type(answer)


def _is_of_another_type(answer: object) -> bool:
    """Tells whether Redis has answered that what is under the key is no string, but a list or the like."""
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


def _is_absent(answer: object) -> bool:
    """Tells whether GETRANGE was answered as it is where there is no such key."""
    return answer is None or answer == b""


def _accept(pool: LocalPool, block: NamedBlock, value: object) -> Verdict:
    """Verifies an answer to GETRANGE and copies its payload into the pool."""
    if _is_absent(value):
        return FetchOutcome.MISSING
    if _is_of_another_type(value):
        return Mismatch.VERSION
    if not isinstance(value, bytes):
        return FetchOutcome.FAILED  # a proxy puts an error in the place of a value that it cannot get
    if len(value) < HEADER_BYTES:
        return Mismatch.LENGTH
    view = memoryview(value)
    header = BlockHeader.decode(view[:HEADER_BYTES])
    mismatch = pool.geometry.verify(header, block, epoch=None)
    if mismatch is not None:
        return mismatch
    payload = np.frombuffer(view[HEADER_BYTES:], np.uint8)
    if payload.size != pool.block_bytes:
        return Mismatch.LENGTH
    np.copyto(pool.rows[block.block_id], payload)
    return header.verify_payload(pool.digest(block.block_id)) or FetchOutcome.FETCHED
