"""Plain `ucxx` send and receive between two processes: the yardstick for the connector over UCX.

It uses the connector's options, sizes and number of bytes in flight, but names, checks and authenticates nothing. This
file is both processes: `python -m bench.bare_ucxx SIZE COUNT ROUNDS` holds the memory, prints its port and sends; with
PORT as a fourth argument it receives and prints the seconds of the fastest round.
"""

import asyncio
import sys
import time
from typing import Any

import numpy as np

from bench.child import child
from kv_connector.ucx.protocol import MAX_ASK_BYTES
from kv_connector.ucx.reader import LANES
from kv_connector.ucx.transport import TCP_OPTIONS

_MODULE = "bench.bare_ucxx"


async def send(size: int, count: int, rounds: int) -> None:
    """Serves `rounds` transfers of `count` buffers of `size` bytes, and ends when standard input does."""
    import ucxx

    served: list[Any] = []
    pool = np.full((count, size), 7, np.uint8)

    async def serve(endpoint: Any) -> None:
        start = np.empty(1, np.uint64)
        for _ in range(rounds * -(-count // _window(size))):
            await endpoint.recv(start)
            first = int(start[0])
            await asyncio.gather(*(endpoint.send(row) for row in pool[first : first + _window(size)]))
        served.append(endpoint)  # may only be closed after the receiver's

    ucxx.init(options=TCP_OPTIONS, progress_mode="blocking")
    listener = ucxx.create_listener(serve)
    print(listener.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the receiver has everything, or has failed


async def receive(port: int, size: int, count: int, rounds: int) -> float:
    """Fetches all buffers `rounds` times and returns the seconds of the fastest round."""
    import ucxx

    pool = np.ones((count, size), np.uint8)
    ucxx.init(options=TCP_OPTIONS, progress_mode="blocking")
    endpoint = await ucxx.create_endpoint("127.0.0.1", port)
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        for first in range(0, count, _window(size)):
            await endpoint.send(np.array([first], np.uint64))
            await asyncio.gather(*(endpoint.recv(row) for row in pool[first : first + _window(size)]))
        best = min(best, time.perf_counter() - started)
    await endpoint.close()
    return best


def bare_rate(size: int, count: int, rounds: int) -> float:
    """Returns bytes per second between two new processes. Raises UnavailableError when one of them fails or hangs."""
    numbers = [str(size), str(count), str(rounds)]
    with child("the sender of bare ucxx", ["-m", _MODULE, *numbers]) as sender:
        port = sender.read_line()
        with child("the receiver of bare ucxx", ["-m", _MODULE, *numbers, port]) as receiver:
            return size * count / float(receiver.read_line())


def _window(size: int) -> int:
    """Returns how many buffers are in flight at a time, as in the connector."""
    return max(1, LANES * MAX_ASK_BYTES // size)


if __name__ == "__main__":
    _size, _count, _rounds = (int(text) for text in sys.argv[1:4])
    if len(sys.argv) > 4:
        print(asyncio.run(receive(int(sys.argv[4]), _size, _count, _rounds)))
    else:
        asyncio.run(send(_size, _count, _rounds))
