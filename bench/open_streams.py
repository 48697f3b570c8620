"""Streams over HTTP that are read and not looked at, so that a server has something to do beside what is measured.

It is a process (`python -m bench.open_streams http://HOST:PORT --streams N`) that prints a line when all of its streams
have begun, and ends with its standard input.
"""

import asyncio
import json
import sys
from urllib.parse import urlsplit

from bench.arguments import positive, script_parser
from kvrelay.core.process.lifecycle import on_stdin_closed

MODEL = "m"
_TOKENS = 100_000  # of each stream: it is to go on until this process ends
_READ_BYTES = 1 << 18


async def hold(url: str, num_streams: int) -> None:
    """Holds so many streams of the server at `url` until the standard input is closed."""
    ended = asyncio.Event()
    on_stdin_closed(ended.set)
    async with asyncio.TaskGroup() as group:
        begun = [asyncio.Event() for _ in range(num_streams)]
        streams = [group.create_task(_read(url, event)) for event in begun]
        for event in begun:
            await event.wait()
        print(f"{num_streams} streams have begun", flush=True)
        await ended.wait()
        for stream in streams:
            stream.cancel()


async def _read(url: str, begun: asyncio.Event) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=_READ_BYTES)
    fields = {"model": MODEL, "prompt": [70] * 32, "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    first = await reader.readline()
    if b" 200 " not in first:
        sys.exit(f"bench.open_streams: {url} answers {first.decode(errors='replace').strip()}")
    begun.set()
    while await reader.read(_READ_BYTES):
        pass
    sys.exit(f"bench.open_streams: {url} has ended a stream")


if __name__ == "__main__":
    parser = script_parser(__file__, __doc__)
    parser.add_argument("url", help="the server")
    parser.add_argument("--streams", type=positive, default=64, help="how many at a time")
    options = parser.parse_args(sys.argv[1:])
    asyncio.run(hold(options.url, options.streams))
