"""How long after the first token the first decode step starts, on a prefill and a decode node of this machine.

    python -m bench.first_decode_step MODEL_DIR

One request at a time over gRPC. The client sees the first token when the prefill node has it, the second when the
decode node's first step is over, and then one per step: the delay is the first gap less the median of the others. It
holds the hand-over: the last chunk's KV, its checks, and the router's word to begin.
"""

import argparse
import asyncio
import random
import statistics
from pathlib import Path

from kvrelay.bench.base import Answer, Generation
from kvrelay.bench.grpc_client import GrpcClient
from kvrelay.cli.local_cluster import local_cluster
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.errors import UnavailableError

_FIRST_ID, _NUM_IDS = 300, 16_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", help="model directory")
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[128, 512, 1500])
    parser.add_argument("--requests", type=int, default=15, help="of each length")
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--connector", default="shared_memory")
    arguments = parser.parse_args()
    options = ["--prefill-nodes", "1", "--decode-nodes", "1", "--connector", arguments.connector]
    with local_cluster(str(Path(arguments.model)), [*options, "--log-level", "warning"]) as address:
        asyncio.run(_measure(address.grpc, arguments))


async def _measure(address: str, arguments: argparse.Namespace) -> None:
    client = GrpcClient(address, Generation(temperature=0.0, ignore_eos=True, timeout=120.0), MonotonicClock())
    await client.resolve_model("")
    draw = random.Random(0)
    for length in arguments.prompt_len:
        gaps = []
        for index in range(arguments.requests + 1):
            answer = Answer()
            prompt = tuple(draw.randrange(_FIRST_ID, _FIRST_ID + _NUM_IDS) for _ in range(length))
            await client.generate(prompt, arguments.output_len, answer)
            if answer.failure is not None or len(answer.arrivals) != arguments.output_len:
                raise UnavailableError(f"a request failed: {answer.failure}")
            if index:  # the first one warms up
                gaps.append([1e3 * (b - a) for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)])
        delays = sorted(first - statistics.median(others) for first, *others in gaps)
        steps = statistics.median(statistics.median(others) for _, *others in gaps)
        print(
            f"{length} prompt tokens: first step {statistics.median(delays):.1f} ms after the first token (median of "
            f"{len(delays)}; {delays[0]:.1f} to {delays[-1]:.1f}), steps of {steps:.1f} ms"
        )
    await client.close()


if __name__ == "__main__":
    main()
