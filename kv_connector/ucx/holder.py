"""The side that sends blocks: it admits readers and answers their Asks directly from the pool's memory.

A reader has one Ask under way on a connection, of at most `blocks_per_ask` blocks, which bounds the bytes in flight;
UCX serves connections in turn. Nothing is pinned: the engine may retract a block while it is being sent.
Invariant: a block is reported as SENT only if its header was visible from before the first byte to after the last.
"""

import asyncio
import logging
from typing import Any

import numpy as np

from kv_connector.header import BlockHeader
from kv_connector.payloads import Payloads
from kv_connector.shared_pool import SharedPool
from kv_connector.stats import ConnectorStats
from kv_connector.ucx.auth import Session, new_nonce
from kv_connector.ucx.protocol import (
    ABSENT,
    ASK_POSITION,
    OPENING_BYTES,
    PROOF_BYTES,
    REPLY_POSITION,
    Entry,
    ProtocolError,
    Status,
    ask_bytes,
    blocks_per_ask,
    decode_ask,
    decode_opening,
    decode_proof,
    encode_opening,
    encode_reply,
    encode_welcome,
)
from kv_connector.ucx.transport import Link, LinkLostError, Transport
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.outages import Outages
from kvrelay.core.tasks import end_tasks

HANDSHAKE_SECONDS = 5.0
SEND_SECONDS = 30.0  # for one Ask, after which the reader counts as lost
IDLE_SECONDS = 600.0
MAX_STRANGERS = 256  # connections without proof yet: after a restart all readers come at once, with two each
MAX_READERS = 1024

_logger = logging.getLogger(__name__)


class Holder:
    """The sender of a pool's blocks, which serves readers from construction until `close`."""

    def __init__(
        self,
        transport: Transport,
        shared: SharedPool[Payloads],
        key: bytes,
        stats: ConnectorStats,
        outages: Outages,
    ) -> None:
        self._shared = shared
        self._geometry = shared.pool.geometry
        self._key = key
        self._stats = stats
        self._outages = outages
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self._absent = np.frombuffer(ABSENT, np.uint8)
        self._listener: Any
        self._listener, self.port = transport.listen(self._admit)

    async def close(self) -> None:
        """Drops every reader. When this has returned, nothing reads the pool any more."""
        self._listener = None
        await end_tasks(*self._tasks)

    def _admit(self, link: Link) -> None:
        if self._listener is None or self._strangers >= MAX_STRANGERS or len(self._tasks) >= MAX_READERS:
            self._stats.peers_refused += 1
            link.cut()
            return
        self._strangers += 1  # until `_meet` has ended; counted before others can come
        task = asyncio.create_task(self._serve(link))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._left(ended, link))

    def _left(self, task: "asyncio.Task[None]", link: Link) -> None:
        self._tasks.discard(task)
        link.cut()  # again, unless the task was cancelled before it had begun

    async def _serve(self, link: Link) -> None:
        """Serves one reader until it leaves or breaks the protocol."""
        try:
            tag = (await self._meet(link)).derive_tag()
            while True:
                await self._answer(link, tag)
        except LinkLostError:
            pass  # the reader has left
        except ProtocolError as error:
            self._stats.peers_refused += 1
            # A peer has no name before it has proved itself: each reason is logged once while such peers keep coming.
            self._outages.failed(f"serving UCX peers ({error.reason})", "dropped a UCX peer: %s", error)
        except TimeoutError:
            _logger.info("dropped a UCX peer that went silent")
        finally:
            await link.close()

    async def _meet(self, link: Link) -> Session:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                return await self._shake_hands(link)
        except TimeoutError:
            raise ProtocolError("no proof of membership in time") from None
        finally:
            self._strangers -= 1

    async def _shake_hands(self, link: Link) -> Session:
        session = Session(self._key, decode_opening(await link.greeting(OPENING_BYTES)), new_nonce())
        link.greet(encode_opening(session.holder_nonce))
        geometry, mac = decode_proof(await link.greeting(PROOF_BYTES))
        session.check(session.reader_proof(geometry), mac)
        epoch = self._shared.epoch
        link.greet(encode_welcome(self._geometry, epoch, session.holder_proof(self._geometry, epoch)))
        if geometry != self._geometry:
            await link.greeting(1)  # ends when the reader has read the Welcome and left
            raise ProtocolError("a reader with another KV layout stays nevertheless")
        return session

    async def _answer(self, link: Link, tag: int) -> None:
        names = await self._next_ask(link, tag)
        chosen = [next(iter(self._shared.find(name)), None) for name in names]
        async with asyncio.timeout(SEND_SECONDS):
            for position, entry in enumerate(chosen):
                payload = self._absent if entry is None else self._shared.pool.payload(entry[0])
                link.send(payload, tag + position)
            await link.wait()
            reply = encode_reply([self._conclude(entry) for entry in chosen])
            link.send(np.frombuffer(reply, np.uint8), tag + REPLY_POSITION)
            await link.wait()

    async def _next_ask(self, link: Link, tag: int) -> list[BlockHash]:
        ask = np.zeros(ask_bytes(self._geometry), np.uint8)
        link.receive(ask, tag + ASK_POSITION)
        async with asyncio.timeout(IDLE_SECONDS):
            await link.wait()
        return decode_ask(ask.tobytes(), blocks_per_ask(self._geometry))

    def _conclude(self, chosen: tuple[int, BlockHeader] | None) -> Entry:
        if chosen is None:
            return Entry(Status.MISSING)
        return Entry(Status.SENT, chosen[1].encode()) if self._shared.shows(*chosen) else Entry(Status.RETRACTED)
