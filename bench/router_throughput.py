"""The router alone: a real router process over a decode node that returns tokens at once (bench/fake_decode_node.py).

    python -m bench.router_throughput demo/model [--wrk] [--profile router.prof]

1. Streamed tokens per second over SSE through one router; with --wrk also measured with wrk, whose own cost is small.
   The router's processor time per token says what it could do with a core to itself, however busy the machine is.
2. Time to first token of one prompt at a time, through the router, and straight at the node over its own protocol: the
   difference is what the router adds.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from tokenizers import Tokenizer

from kvrelay.bench.measure import measure
from kvrelay.bench.result import RunResult
from kvrelay.bench.settings import BenchSettings, LatencyBenchSettings, ThroughputBenchSettings
from kvrelay.core.rpc import channel_options
from kvrelay.v1 import common_pb2, decode_node_pb2, decode_node_pb2_grpc

MODEL = "m"
WRK_SCRIPT = """
wrk.method = "POST"
wrk.path = "/v1/completions"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [==[{body}]==]
"""


@contextmanager
def child(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A process of ours; yields the first line it prints, and its id."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.stdin.close()
            process.wait(30)


def run(settings: BenchSettings) -> RunResult:
    _, [result] = asyncio.run(measure(settings))
    for failure in result.summary.failures:
        raise SystemExit(f"{failure.count} x {failure.kind}: {failure.first_message}")
    return result


def processor_seconds(process: int) -> float:
    """All that it has taken until now."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def throughput(url: str, router: int, options: argparse.Namespace) -> None:
    before = processor_seconds(router)
    result = run(
        ThroughputBenchSettings(
            url=url,
            requests=options.requests,
            concurrency=options.concurrency,
            input_len="32",
            output_len=str(options.output_len),
            tokenizer=options.model,
            progress="off",
        )
    )
    summary = result.summary
    per_token = (processor_seconds(router) - before) / summary.output_tokens
    print(
        f"{url.partition(':')[0]}, {options.concurrency} streams: {summary.output_tokens_per_second:8.0f} tokens/s; of "
        f"a core, the router took {per_token * 1e6:.1f} us for each ({1 / per_token:.0f} a second), this client "
        f"{result.client_cpu_seconds / summary.output_tokens * 1e6:.1f} us",
        flush=True,
    )


def throughput_by_wrk(url: str, options: argparse.Namespace) -> None:
    """wrk counts whole responses, each of a known number of tokens."""
    body = {"model": MODEL, "prompt": [70] * 32, "max_tokens": options.output_len, "temperature": 0, "stream": True}
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(WRK_SCRIPT.replace("{body}", json.dumps(body | {"ignore_eos": True})))
        script.flush()
        command = ["wrk", "-t1", f"-c{options.concurrency}", "-d10s", "--timeout", "60s", "-s", script.name, url]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    if "Non-2xx" in output:
        raise SystemExit(output)
    [line] = [line for line in output.splitlines() if line.startswith("Requests/sec")]
    rate = float(line.split()[1]) * options.output_len
    print(f"http by wrk, {options.concurrency} streams: {rate:8.0f} tokens/s", flush=True)


def added_ttft(url: str, node: str, options: argparse.Namespace) -> None:
    def through_router(seed: int) -> float:
        result = run(
            LatencyBenchSettings(
                url=url,
                requests=50,
                input_len="1000",
                output_len="2",
                tokenizer=options.model,
                seed=seed,
                progress="off",
            )
        )
        assert result.summary.ttft is not None
        return result.summary.ttft.p50

    pairs = [(through_router(seed), asyncio.run(node_ttft(node))) for seed in range(5)]
    added = statistics.median(routed - straight for routed, straight in pairs)
    routed, straight = (statistics.median(values) for values in zip(*pairs, strict=True))
    print(
        f"{url.partition(':')[0]}, prompt of 1,000 tokens: TTFT p50 {routed * 1e3:.2f} ms, straight at the node "
        f"{straight * 1e3:.2f} ms: the router adds {added * 1e3:.2f} ms",
        flush=True,
    )


async def node_ttft(address: str) -> float:
    """Median of 50, over one open stream, as the router has it."""
    params = common_pb2.SamplingParams(n=1, max_tokens=2, top_p=1.0, repetition_penalty=1.0)
    times: list[float] = []
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub: decode_node_pb2_grpc.DecodeNodeAsyncStub = decode_node_pb2_grpc.DecodeNodeStub(channel)  # type: ignore[assignment]
        call = stub.Serve()
        for number in range(50):
            admit = decode_node_pb2.Admit(
                request_id=str(number), prompt_token_ids=range(300, 1300), sampling_params=params, local_prefill=True
            )
            started = time.monotonic()
            await call.write(decode_node_pb2.DecodeCommand(admit=admit))
            await call.read()
            times.append(time.monotonic() - started)
            await call.read()
        call.cancel()
    return statistics.median(times)


def router_arguments(options: argparse.Namespace, node: str) -> list[str]:
    profiled = ["-m", "cProfile", "-o", str(options.profile)] if options.profile else []
    flags = ["--port", "0", "--grpc-port", "0", "--served-model-name", MODEL, "--log-level", "warning", "--supervised"]
    return [*profiled, "-m", "router", options.model, "--decode-nodes", node, *flags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a model; only its tokenizer is read")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=2.0, help="of the node; streams / step is the most it offers")
    parser.add_argument("--wrk", action="store_true", help="measure with wrk, too; it must be installed")
    parser.add_argument("--profile", type=Path, help="write the router's cProfile here (it is much slower then)")
    options = parser.parse_args()
    vocab_size = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json")).get_vocab_size()
    with child(
        ["-m", "bench.fake_decode_node", "--vocab-size", str(vocab_size), "--step-ms", str(options.step_ms)]
    ) as (
        node,
        _,
    ):
        with child(router_arguments(options, node)) as (line, router):
            ready = json.loads(line)
            urls = [f"http://{ready['http_address']}", f"grpc://{ready['grpc_address']}"]
            for url in urls:
                throughput(url, router, options)
            if options.wrk:
                throughput_by_wrk(urls[0], options)
            for url in urls:
                added_ttft(url, node, options)


if __name__ == "__main__":
    main()
