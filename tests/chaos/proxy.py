"""A TCP proxy in front of one node, which stands for the network that a test can break.

Invariant: bytes arrive in order and unchanged, or the connection is closed on both sides.
"""

import asyncio
import contextlib

from kvrelay.core.tasks import end_tasks

_CHUNK_BYTES = 1 << 16


class Proxy:
    """A proxy that forwards to `port` on loopback from `start` to `close`. It closes a connection at once if the node
    does not listen."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._connected = asyncio.Event()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    def cut(self) -> None:
        """Breaks every connection there is; new ones are let through."""
        self._connected.clear()
        for writer in self._writers:
            writer.transport.abort()

    def redirect(self, port: int) -> None:
        """Forwards new connections to another port, as a name does that is given to another host."""
        self._target = port

    async def wait_connected(self) -> None:
        """Returns when somebody has connected since the last `cut`."""
        await self._connected.wait()

    def silence(self) -> None:
        """Becomes a black hole: connections stay open, connecting succeeds, and nothing comes through until `speak`."""
        self._passing.clear()

    def speak(self) -> None:
        self._passing.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await end_tasks(*self._tasks)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connected.set()
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._passing.wait()
            try:
                node_reader, node_writer = await asyncio.open_connection("127.0.0.1", self._target)
            except OSError:
                return
            self._writers.add(node_writer)
            try:
                await self._pump_both(reader, writer, node_reader, node_writer)
            finally:
                self._writers.discard(node_writer)
                node_writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump_both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        node_reader: asyncio.StreamReader,
        node_writer: asyncio.StreamWriter,
    ) -> None:
        """Forwards in both directions and returns when one of them ends."""
        pumps = [
            asyncio.create_task(self._pump(reader, node_writer)),
            asyncio.create_task(self._pump(node_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(*pumps)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
