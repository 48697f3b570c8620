"""How long after the first token the first decode step starts, on a prefill and a decode node of this machine.

    python -m bench.first_decode_step MODEL_DIR

One request at a time over gRPC. The hand-over is what the router sees: from the first token, which it passes on at
once, to the decode node's word that it has all KV and goes on, which that node sends as its step starts. So it holds
the last chunk's KV, its checks, and one more way from node to router. The first gap less the median of the others, as
the client sees them, is printed beside it: that also holds how much longer the first step takes on a node that has done
nothing for a while, whose weights have left the caches.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc

from kvrelay.cli.local_cluster import local_cluster
from kvrelay.v1 import router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    from kvrelay.v1.router_pb2_grpc import RouterAsyncStub

_FIRST_ID, _NUM_IDS = 300, 16_000
_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Timing:
    """In milliseconds."""

    handover: float
    first_gap: float
    step: float


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
        asyncio.run(_measure(address.grpc, address.model, arguments))


async def _measure(address: str, model: str, arguments: argparse.Namespace) -> None:
    draw = random.Random(0)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = cast("RouterAsyncStub", router_pb2_grpc.RouterStub(channel))
        for length in arguments.prompt_len:
            timings = []
            for _ in range(arguments.requests + 1):
                prompt = [draw.randrange(_FIRST_ID, _FIRST_ID + _NUM_IDS) for _ in range(length)]
                timings.append(await _generate(stub, model, prompt, arguments.output_len))
            _report(length, timings[1:])  # the first one warms up


async def _generate(stub: "RouterAsyncStub", model: str, prompt: list[int], output_len: int) -> Timing:
    request = router_pb2.GenerateRequest(model=model, max_tokens=output_len, temperature=0.0, ignore_eos=True)
    request.prompt_token_ids.ids.extend(prompt)
    arrivals: list[float] = []
    trace = router_pb2.RequestTrace()
    async for response in stub.GenerateStream(request, timeout=_TIMEOUT):
        arrivals += [time.monotonic() for output in response.outputs if output.token_ids]
        if response.HasField("trace"):
            trace = response.trace
    assert trace.prefill_node and trace.num_migrations == 0, "the prompt was not prefilled elsewhere, once"
    first, *others = [1e3 * (b - a) for a, b in itertools.pairwise(arrivals)]
    return Timing(1e3 * trace.handover_seconds, first, statistics.median(others))


def _report(length: int, timings: list[Timing]) -> None:
    handovers = sorted(timing.handover for timing in timings)
    late = statistics.median(timing.first_gap - timing.step for timing in timings)
    step = statistics.median(timing.step for timing in timings)
    print(
        f"{length} prompt tokens: hand-over {statistics.median(handovers):.1f} ms after the first token (median of "
        f"{len(handovers)}; {handovers[0]:.1f} to {handovers[-1]:.1f}); first gap {late:.1f} ms above a step's "
        f"{step:.1f} ms"
    )


if __name__ == "__main__":
    main()
