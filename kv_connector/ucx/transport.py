"""A UCX worker on the running asyncio loop, and the links (UCX endpoints) over it.

ucxx's own asyncio layer polls while anything waits, and keeps one global context; this one sleeps in the loop's epoll
and belongs to one connector. Everything runs on the loop's thread. `environment.py` has to run before this is imported.

Invariant: a buffer given to a link is neither freed nor reported as free before UCX has ended the operation on it.
"""

import asyncio
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from ucxx._lib.arr import Array
from ucxx._lib.libucxx import (
    Feature,
    UCXContext,
    UCXEndpoint,
    UCXListener,
    UCXWorker,
    UCXXTag,
    UCXXTagMaskFull,
)
from ucxx.exceptions import UCXError

from kv_connector.settings import LOOPBACK_DEVICE
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.tasks import uninterrupted

OPTIONS = {
    # Both ends must have the same: UCX does not check that a segment from a peer fits. The default, 8 KiB, is slow.
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
    "TCP_PUT_ENABLE": "n",  # a peer never writes to an address of its choice
    # Larger messages are transferred by rendezvous, which can be cancelled; eager messages cannot.
    "RNDV_THRESH": "8192",
}
# Without RDMA. UCX's own choice is slower over TCP.
TCP_OPTIONS = {**OPTIONS, "RNDV_SCHEME": "am"}
DEVICE_OPTIONS = {
    **OPTIONS,
    # The reader reads, over NVLink, PCIe or RDMA. Otherwise blocks are sent through buffers in host memory, which ucxx
    # would have UCX take from the device.
    "RNDV_SCHEME": "get_zcopy",
    "RNDV_FRAG_MEM_TYPES": "host",
}
_TURN_SECONDS = 0.0003  # longest time for which UCX keeps the loop from others
_GUARD_SECONDS = 1.0  # until UCX gets a turn in any case, since its event descriptor may miss a wake-up

_logger = logging.getLogger(__name__)


class LinkLostError(KVError):
    """The peer closed the connection, died, or cannot be reached."""


class Transport:
    """A UCX context with one worker, driven by the loop it was made on."""

    def __init__(self, net_devices: str, *, on_device: bool = False) -> None:
        """`net_devices`: as in `UcxSettings`. `on_device`: the blocks are in device memory, and CUDA is in use on this
        thread. Raises ConfigurationError when UCX does not start, for example without such a device."""
        devices = {"NET_DEVICES": net_devices} if net_devices else {}
        self._stays_local = net_devices == LOOPBACK_DEVICE
        try:
            self._context = _context({**(DEVICE_OPTIONS if on_device else OPTIONS), **devices})
            if not on_device and not _has_rdma(self._context):
                self._context = _context({**TCP_OPTIONS, **devices})
            self._worker: Any = UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        except UCXError as error:
            raise ConfigurationError(
                f"UCX does not start (network devices {net_devices or 'all'!r}): {error}"
            ) from error
        self._worker.init_blocking_progress_mode()
        self._loop = asyncio.get_running_loop()
        self._fd: int = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self._turn)
        self._waiting: dict[Link, asyncio.Future[None]] = {}
        self._next_turn: asyncio.Handle | None = None
        self._guard: asyncio.TimerHandle | None = None
        self.kick()

    def knows(self, kind: str) -> bool:
        """Tells whether UCX recognises this kind of memory ("host", "cuda"). Otherwise it would use device addresses as
        if they were the host's, and crash."""
        components = {"cuda": "cuda_cpy"}
        return kind == "host" or _has_component(self._context, components[kind])

    def listen(self, on_link: Callable[["Link"], None]) -> tuple[Any, int]:
        """Returns a listener, which lasts as long as the reference to it, and its port. `on_link` is called on the
        loop."""

        def accept(endpoint: Any) -> None:
            self._loop.call_soon(on_link, Link(self, endpoint))

        listener: Any = UCXListener.create(worker=self._worker, port=0, cb_func=accept, deliver_endpoint=True)
        if self._stays_local:
            _keep_to_loopback(int(listener.port))
        return listener, int(listener.port)

    def connect(self, address: str, port: int) -> "Link":
        """Returns a link at once; the first operation fails if nobody listens. Raises LinkLostError."""
        if self._worker is None:
            raise LinkLostError("the connector was closed")
        try:
            endpoint = UCXEndpoint.create(self._worker, address, port, True)
        except UCXError as error:
            raise LinkLostError(f"cannot connect to {address}:{port}: {error}") from error
        return Link(self, endpoint)

    def kick(self) -> None:
        """Has UCX get a turn soon. Called after an operation was posted."""
        if self._next_turn is None and self._worker is not None:
            self._next_turn = self._loop.call_soon(self._turn)

    def flush(self) -> None:
        """Lets UCX do everything it can do now, cancellations among it. Whoever waits for some of it hears of it soon:
        no event follows."""
        if self._worker is not None:
            self._worker.progress()
            self.kick()

    async def wait(self, link: "Link") -> None:
        """Returns when every operation of the link has ended. Raises LinkLostError. A link has one waiter at a time."""
        assert link not in self._waiting
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[link] = future
        self.kick()
        try:
            await future
        finally:
            self._waiting.pop(link, None)

    def close(self) -> None:
        """Gives up the worker and its context. Called after every link was closed."""
        for link, future in self._waiting.items():
            link.settle(future)
        self._loop.remove_reader(self._fd)
        for handle in (self._next_turn, self._guard):
            if handle is not None:
                handle.cancel()
        self._worker = self._context = None

    def _turn(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        worker = self._worker
        if worker is None:
            return
        end = time.monotonic() + _TURN_SECONDS
        idle = False
        while not idle and time.monotonic() < end:
            idle = not worker.progress_once()
        for link, future in list(self._waiting.items()):
            link.settle(future)
        if not idle or not worker.arm():
            self.kick()
        elif self._guard is None and self._waiting:
            self._guard = self._loop.call_later(_GUARD_SECONDS, self._guarded)

    def _guarded(self) -> None:
        self._guard = None
        self._turn()


def _keep_to_loopback(port: int) -> None:
    """Has the socket that listens at `port` take connections over the loopback interface only: UCX trusts whatever
    reaches it, and ucxx has it listen on every address."""
    for descriptor in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as found:
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and found.family == socket.AF_INET and found.getsockname()[1] == port:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK_DEVICE.encode())
                return
    _logger.warning("UCX listens at port %d on all addresses: it could not be kept to loopback", port)


def _context(options: dict[str, str]) -> Any:
    return UCXContext(options, feature_flags=(Feature.STREAM, Feature.TAG, Feature.WAKEUP))


def _has_rdma(context: Any) -> bool:
    """Tells whether UCX has found an InfiniBand or RoCE device among those that it may use."""
    return _has_component(context, "ib")


def _has_component(context: Any, name: str) -> bool:
    return re.search(rf"component\s+\d+\s*:\s*{name}\b", str(context.info)) is not None


class Link:
    """A connection. Operations are posted, then awaited together with `wait`."""

    def __init__(self, transport: Transport, endpoint: Any) -> None:
        self._transport = transport
        self._endpoint = endpoint
        # Request, its buffer, and a function to call when it has succeeded; oldest first.
        self._posted: deque[tuple[Any, Any, Callable[[], None] | None]] = deque()
        self._lost = False
        endpoint.set_close_callback(self._on_close)

    @property
    def alive(self) -> bool:
        return not self._lost

    def greet(self, message: bytes) -> None:
        """Posts a send on the stream, for messages before there is a tag."""
        array = Array(np.frombuffer(message, np.uint8))
        self._post(lambda: self._endpoint.stream_send(array), array)

    async def greeting(self, size: int) -> bytes:
        """Returns the next `size` bytes of the stream. Raises LinkLostError. For the handshake only: ucxx 0.52 never
        frees a connection that was cut while such a receive was pending."""
        message = np.empty(size, np.uint8)
        array = Array(message)
        self._post(lambda: self._endpoint.stream_recv(array), array)
        await self.wait()
        return message.tobytes()

    def send(self, payload: object, tag: int) -> None:
        array = Array(payload)
        self._post(lambda: self._endpoint.tag_send(array, UCXXTag(tag)), array)

    def receive(self, destination: object, tag: int, then: Callable[[], None] | None = None) -> None:
        """Posts a receive into `destination`. A longer message ends the link. `then` is called when this message and
        everything posted before have arrived, while the message may still be in the cache."""
        array = Array(destination)
        self._post(lambda: self._endpoint.tag_recv(array, UCXXTag(tag), UCXXTagMaskFull), array, then)

    async def wait(self) -> None:
        """Returns when every posted operation has ended. Raises LinkLostError."""
        await self._transport.wait(self)

    def settle(self, future: "asyncio.Future[None]") -> None:
        """Sets the result or the error of a wait that is over."""
        if future.done():
            return
        if self._endpoint is None:  # cut meanwhile: operations that have ended need not have succeeded
            future.set_exception(LinkLostError("the connection was cut"))
            return
        try:
            while self._posted and self._posted[0][0].completed:
                request, _, then = self._posted.popleft()
                request.check_error()
                if then is not None:
                    then()
        except UCXError as error:
            future.set_exception(LinkLostError(str(error)))
            return
        if not self._posted:
            future.set_result(None)
        elif self._lost:
            future.set_exception(LinkLostError("the connection was lost"))

    def cut(self) -> bool:
        """Ends the connection now, whatever the peer does; tells whether every operation has ended, so that no buffer
        is touched any more. UCX was seen to close the socket and cancel operations even with a stopped peer.
        Idempotent."""
        if self._endpoint is not None:
            self._endpoint.close_blocking()
            self._endpoint.remove_close_callback()
            self._endpoint = None
            self._lost = True
            self._transport.flush()
        while self._posted and self._posted[0][0].completed:
            self._posted.popleft()
        return not self._posted

    async def close(self) -> None:
        """Cuts the connection and returns when no buffer is touched any more, even when the caller is cancelled."""
        if not self.cut():
            await uninterrupted(self._until_quiet())

    async def _until_quiet(self) -> None:
        """Cuts again and again until UCX has given up the last buffer. Keeping blocks for ever is better than having
        them overwritten under their next owner."""
        pause = 0.001
        while not self.cut():
            await asyncio.sleep(pause)
            self._transport.flush()
            if pause > 0.5:
                _logger.warning("UCX still holds %d buffers of a connection that was cut", len(self._posted))
            pause = min(2 * pause, 10.0)

    def _post(self, operation: Callable[[], Any], array: Any, then: Callable[[], None] | None = None) -> None:
        if self._lost:
            raise LinkLostError("the connection was lost")
        try:
            self._posted.append((operation(), array, then))
        except UCXError as error:
            raise LinkLostError(str(error)) from error
        self._transport.kick()

    def _on_close(self) -> None:
        """Called by UCX while it progresses, after which whoever waits is told."""
        self._lost = True
