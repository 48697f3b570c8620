"""The side that fetches: a few authenticated connections per holder, each with one Ask under way.

Payloads are received directly in the blocks that the caller reserved. Fetches from one holder take turns, Ask by Ask,
first come first served; a holder never sends to us for more than `LANES` Asks at a time.
Invariant: when `ask` has returned or raised, nothing writes to its destinations: either every receive has ended, or the
connection was cut and UCX has given the buffers back (see `Link.close`).
"""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kv_connector.base import FetchOutcome
from kv_connector.geometry import Geometry
from kv_connector.header import BlockHeader, Mismatch
from kv_connector.payloads import Payloads
from kv_connector.stats import ConnectorStats
from kv_connector.ucx.auth import Session, new_nonce
from kv_connector.ucx.holder import HANDSHAKE_SECONDS
from kv_connector.ucx.protocol import (
    ASK_POSITION,
    ENTRY_BYTES,
    OPENING_BYTES,
    REPLY_POSITION,
    WELCOME_BYTES,
    Entry,
    ProtocolError,
    Status,
    blocks_per_ask,
    decode_opening,
    decode_reply,
    decode_welcome,
    encode_ask,
    encode_opening,
    encode_proof,
)
from kv_connector.ucx.transport import Link, LinkLostError, Transport
from kv_connector.verdict import Verdict
from kvrelay.core.errors import KVError
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.tasks import uninterrupted

LANES = 2  # one Ask is verified while the next one travels
# For what is under way when its fetch ends, 4 MiB at most: ucxx 0.52 never frees all of a receive that was broken off.
_LET_END_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Lane:
    """An authenticated connection, with the geometry and epoch that its holder has proved."""

    link: Link
    tag: int
    geometry: Geometry
    epoch: int


class Peer:
    """The connections to the holder at one endpoint. `num_answers`: Asks that it has answered, whoever's they were."""

    def __init__(self, endpoint: str, transport: Transport, pool: Payloads, key: bytes, stats: ConnectorStats) -> None:
        self.num_answers = 0
        self._endpoint = endpoint
        self._transport = transport
        self._pool = pool
        self._geometry = pool.geometry
        self._key = key
        self._stats = stats
        self._turns = asyncio.Semaphore(LANES)
        self._idle: list[Lane] = []

    @property
    def blocks_per_ask(self) -> int:
        return blocks_per_ask(self._geometry)

    @property
    def is_deserted(self) -> bool:
        """Tells whether no connection is left; meaningful while no fetch is under way."""
        return not any(lane.link.alive for lane in self._idle)

    async def ask(self, source: KVSource, blocks: Sequence[NamedBlock]) -> list[Verdict] | Mismatch:
        """Fetches blocks of one Ask. Returns one verdict per block, or the mismatch for which all blocks of this source
        are refused. Raises KVError (LinkLostError and ProtocolError are such), or OSError (TimeoutError is one)."""
        async with self._turns:
            lane = await self._lane()
            mismatch = self._mismatch(lane, source)
            if mismatch is not None:
                if lane.geometry == self._geometry:
                    self._idle.append(lane)
                else:
                    await lane.link.close()  # the holder, which has nothing for us, waits for that
                return mismatch
            entries, digests = await self._exchange(lane, blocks)
            self.num_answers += 1
            self._idle.append(lane)
        late = [
            index
            for index, (entry, digest) in enumerate(zip(entries, digests, strict=True))
            if digest is None and entry.status is Status.SENT
        ]
        if late:
            found = await self._pool.digests([blocks[index].block_id for index in late])
            for index, digest in zip(late, found, strict=True):
                digests[index] = digest
        return [self._judge(*judged, source) for judged in zip(entries, digests, blocks, strict=True)]

    async def close(self) -> None:
        """Cuts every connection. Called when no fetch is under way."""
        for lane in self._idle:
            await lane.link.close()
        self._idle.clear()

    def _mismatch(self, lane: Lane, source: KVSource) -> Mismatch | None:
        if lane.epoch != source.epoch:
            return Mismatch.EPOCH
        return self._geometry.mismatch(lane.geometry)

    async def _lane(self) -> Lane:
        while self._idle:
            lane = self._idle.pop()
            if lane.link.alive:
                return lane
            await lane.link.close()  # the holder is gone, or has closed an idle connection
        address, port = await _resolve(self._endpoint)
        link = self._transport.connect(address, port)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                return await self._shake_hands(link)
        except BaseException:
            await link.close()
            raise

    async def _shake_hands(self, link: Link) -> Lane:
        nonce = new_nonce()
        link.greet(encode_opening(nonce))
        session = Session(self._key, nonce, decode_opening(await link.greeting(OPENING_BYTES)))
        link.greet(encode_proof(self._geometry, session.reader_proof(self._geometry)))
        try:
            welcome = await link.greeting(WELCOME_BYTES)
        except LinkLostError as error:  # what UCX says of it is about lengths
            raise LinkLostError("it left after our proof: has it the same cluster secret?") from error
        geometry, epoch, mac = decode_welcome(welcome)
        session.check(session.holder_proof(geometry, epoch), mac)
        return Lane(link, session.derive_tag(), geometry, epoch)

    async def _exchange(self, lane: Lane, blocks: Sequence[NamedBlock]) -> tuple[list[Entry], list[bytes | None]]:
        """Sends the Ask, receives payloads and Reply. Returns the holder's entry for each block, and the digest of what
        arrived where it can be had at once. When this has returned or raised, nothing writes to the destinations."""
        link = lane.link
        digests: list[bytes | None] = []
        try:
            for position, block in enumerate(blocks):
                arrived = partial(self._arrived, block.block_id, digests)
                link.receive(self._pool.payload(block.block_id), lane.tag + position, arrived)
            reply = np.zeros(len(blocks) * ENTRY_BYTES, np.uint8)
            link.receive(reply, lane.tag + REPLY_POSITION)
            ask = encode_ask([block.block_hash for block in blocks])
            link.send(np.frombuffer(ask, np.uint8), lane.tag + ASK_POSITION)
            await link.wait()
            return decode_reply(reply.tobytes()), digests
        except asyncio.CancelledError:
            await uninterrupted(self._let_end(lane, len(blocks)))
            raise
        except BaseException:
            await uninterrupted(self._cut(link, len(blocks)))
            raise

    async def _let_end(self, lane: Lane, num_blocks: int) -> None:
        """Ends an Ask for which nobody waits any more. One that is answered soon costs no connection."""
        try:
            async with asyncio.timeout(_LET_END_SECONDS):
                await lane.link.wait()
        except (KVError, TimeoutError):
            await self._cut(lane.link, num_blocks)
        else:
            self.num_answers += 1
            self._idle.append(lane)

    async def _cut(self, link: Link, num_blocks: int) -> None:
        """Cuts a connection over which so many blocks were coming. Returns when neither UCX nor the device touches
        their destinations any more."""
        self._stats.quarantined += 0 if link.cut() else num_blocks
        await link.close()
        await self._pool.quiesce()

    def _arrived(self, block_id: int, digests: list[bytes | None]) -> None:
        digests.append(self._pool.digest_on_arrival(block_id))

    def _judge(self, entry: Entry, digest: bytes | None, block: NamedBlock, source: KVSource) -> Verdict:
        if entry.status is not Status.SENT:
            return FetchOutcome.MISSING
        assert digest is not None, "every block that was sent has a digest"
        header = BlockHeader.decode(entry.header)
        mismatch = self._geometry.verify(header, block, epoch=source.epoch) or header.verify_payload(digest)
        return mismatch or FetchOutcome.FETCHED


async def _resolve(endpoint: str) -> tuple[str, int]:
    """Returns address and port of "host:port". Raises ProtocolError for another shape, OSError for an unknown host."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ProtocolError(f"not a UCX endpoint: {endpoint!r}")
    try:
        return str(ipaddress.IPv4Address(host)), int(port)
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, int(port), family=socket.AF_INET, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a name that no host can have, such as "a..b"
        raise ProtocolError(f"not a UCX endpoint: {endpoint!r}") from error
    return str(found[0][4][0]), int(port)
