"""Plain `ucxx` send/recv between two processes: what a connector over UCX is measured against.

The same options, sizes and bytes in flight as the connector's; nothing is named, checked or authenticated. The holder
is this file as a process (`python -m bench.bare_ucxx SIZE COUNT ROUNDS`): prints its port, then sends.
"""

import asyncio
import subprocess
import sys
import time
from typing import Any

import numpy as np

from kv_connector.ucx.protocol import MAX_ASK_BYTES
from kv_connector.ucx.reader import LANES
from kv_connector.ucx.transport import TCP_OPTIONS


async def send(size: int, count: int, rounds: int) -> None:
    """The holder."""
    import ucxx

    done = asyncio.Event()
    served: list[Any] = []
    pool = np.full((count, size), 7, np.uint8)

    async def serve(endpoint: Any) -> None:
        start = np.empty(1, np.uint64)
        for _ in range(rounds * -(-count // _window(size))):
            await endpoint.recv(start)
            first = int(start[0])
            await asyncio.gather(*(endpoint.send(row) for row in pool[first : first + _window(size)]))
        served.append(endpoint)  # to be closed only after the reader
        done.set()

    ucxx.init(options=TCP_OPTIONS, progress_mode="blocking")
    listener = ucxx.create_listener(serve)
    print(listener.port, flush=True)
    await done.wait()
    await asyncio.to_thread(sys.stdin.read)


async def receive(port: int, size: int, count: int, rounds: int) -> float:
    """The reader; seconds of the best round."""
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
    """GB/s, between two processes of their own, which inherit `prepare_ucx_environment`."""
    numbers = [str(size), str(count), str(rounds)]
    command = [sys.executable, "-m", "bench.bare_ucxx"]
    with subprocess.Popen([*command, *numbers], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        port = holder.stdout.readline().strip()
        reader = subprocess.run([*command, *numbers, port], stdout=subprocess.PIPE, text=True, check=True)
        holder.stdin.close()
    return size * count / float(reader.stdout) / 1e9


def _window(size: int) -> int:
    return max(1, LANES * MAX_ASK_BYTES // size)


if __name__ == "__main__":
    _size, _count, _rounds = (int(text) for text in sys.argv[1:4])
    if len(sys.argv) > 4:
        print(asyncio.run(receive(int(sys.argv[4]), _size, _count, _rounds)))
    else:
        asyncio.run(send(_size, _count, _rounds))
