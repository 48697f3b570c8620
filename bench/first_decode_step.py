"""How long after the first token the first decode step starts, on a prefill and a decode node of this machine.

    python -m bench.first_decode_step MODEL_DIR

Sends one request at a time over gRPC. The hand-over is what the router sees: from the first token, which it passes on
at once, to the decode node's message that it has all KV and continues, which that node sends as its step starts. It
includes the transfer of the last chunk's KV, its checks, and the way from the node to the router. Beside it stands the
first gap between tokens less the median of the other gaps, as the client sees them: that also includes how much longer
the first step takes on a node that has been idle, whose weights have left the caches.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from bench.arguments import positive, script_parser
from bench.figures import Figure, add_json_file, write_figures
from bench.local_cluster import local_cluster
from bench.python_speed import python_speed
from kvrelay.core.errors import KVRelayError, UnavailableError
from kvrelay.v1 import router_pb2, router_pb2_grpc

_FIRST_ID, _MAX_ID = 300, 16_300  # behind bytes and special tokens
_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, in milliseconds. `step` is the median gap between its later tokens."""

    handover: float
    first_gap: float
    step: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument("model", help="model directory")
    parser.add_argument(
        "--prompt-len", type=positive, nargs="+", default=[128, 512, 1500], help="prompt tokens, one length or several"
    )
    parser.add_argument("--requests", type=positive, default=15, help="requests of each length, besides one to warm up")
    parser.add_argument("--output-len", type=int, default=16, help="output tokens of each request, at least 3")
    parser.add_argument("--connector", default="shared_memory", help="how KV moves: shared_memory, ucx or redis")
    add_json_file(parser)
    arguments = parser.parse_args(argv)
    if arguments.output_len < 3:
        parser.error("--output-len: at least 3, so that there is a gap besides the first one")
    options = ["--prefill-nodes", "1", "--decode-nodes", "1", "--connector", arguments.connector]
    # Nothing is prefilled on the decode node, so that there is a hand-over whatever the prompt's length.
    options += ["--local-prefill-max-tokens", "0"]
    # Tokens of short steps would travel together, and leave no gaps to measure.
    options += ["--stream-interval", "0", "--log-level", "warning"]
    print(python_speed(), flush=True)
    try:
        with local_cluster(str(Path(arguments.model)), options) as address:
            figures = asyncio.run(_measure(address.grpc, address.model, arguments))
    except KVRelayError as error:
        sys.exit(f"bench.first_decode_step: {error}")
    write_figures(arguments.json_file, figures)


async def _measure(address: str, model: str, arguments: argparse.Namespace) -> list[Figure]:
    """Prints what has been measured, and returns it."""
    figures: list[Figure] = []
    draw = random.Random(0)
    vocab_size = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
    ids = range(_FIRST_ID, min(_MAX_ID, vocab_size))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = cast("router_pb2_grpc.RouterAsyncStub", router_pb2_grpc.RouterStub(channel))
        for length in arguments.prompt_len:
            timings = []
            for _ in range(arguments.requests + 1):
                prompt = [draw.choice(ids) for _ in range(length)]
                timings.append(await _generate(stub, model, prompt, arguments.output_len))
            figures += _report(length, timings[1:])  # the first one warms up
    return figures


async def _generate(stub: "router_pb2_grpc.RouterAsyncStub", model: str, prompt: list[int], output_len: int) -> Timing:
    request = router_pb2.GenerateRequest(model=model, max_tokens=output_len, temperature=0.0, ignore_eos=True)
    request.prompt_token_ids.ids.extend(prompt)
    arrivals: list[float] = []
    trace = router_pb2.RequestTrace()
    async for response in stub.GenerateStream(request, timeout=_TIMEOUT):
        arrivals += [time.monotonic() for output in response.outputs if output.token_ids]
        if response.HasField("trace"):
            trace = response.trace
    assert trace.prefill_node and trace.num_migrations == 0, "the prompt was not prefilled once, on the prefill node"
    if len(arrivals) < 3:
        raise UnavailableError("the tokens came together: measure a larger model, or take a larger --output-len")
    first, *others = [1e3 * (b - a) for a, b in itertools.pairwise(arrivals)]
    return Timing(1e3 * trace.handover_seconds, first, statistics.median(others))


def _report(length: int, timings: list[Timing]) -> list[Figure]:
    handovers = sorted(timing.handover for timing in timings)
    late = statistics.median(timing.first_gap - timing.step for timing in timings)
    step = statistics.median(timing.step for timing in timings)
    handover = statistics.median(handovers)
    print(
        f"{length} prompt tokens: hand-over {handover:.1f} ms after the first token (median of "
        f"{len(handovers)}; {handovers[0]:.1f} to {handovers[-1]:.1f}); first gap {late:.1f} ms above a step's "
        f"{step:.1f} ms"
    )
    return [
        Figure(f"{length} prompt tokens: hand-over", handover, "ms"),
        Figure(f"{length} prompt tokens: first gap above a step", late, "ms"),
    ]


if __name__ == "__main__":
    main()
