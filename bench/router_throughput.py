"""The router alone: a real router process over nodes that return tokens at once (bench/fake_node.py).

    python -m bench.router_throughput demo/model [--wrk] [--profile router.prof]

1. Streamed tokens per second through one router, over SSE and gRPC; with --wrk also measured with wrk, whose own cost
   is small. The router's processor time per token says what it could do with a core to itself, however busy the
   machine is. A router that cannot keep up with the node gets several tokens of a stream at a time, and so do clients;
   `--step-ms` sets what the node offers.
2. Time to first token of one prompt at a time, through the router and directly at the node over its own protocol. The
   difference is what the router adds: to token ids, and over HTTP also to a text, which it tokenises.
3. The same time over HTTP while the router streams as much as in 1. The prompts come at random times, since those sent
   one after the other would fall into the gaps between the steps of the streams.
4. What a request of a prompt and two tokens costs the router over HTTP, without and with a prefill node, and what the
   router adds to TTFT with one.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import grpc
from tokenizers import Tokenizer

from bench.arguments import positive, script_parser
from bench.child import child
from bench.figures import Figure, add_json_file, write_figures
from bench.open_streams import MODEL
from bench.proc_stat import processor_seconds
from bench.python_speed import python_speed
from bench.whole_run import whole_run
from kvrelay.bench.settings import LatencyBenchSettings, ServeBenchSettings, ThroughputBenchSettings
from kvrelay.core.errors import KVRelayError, UnavailableError
from kvrelay.core.rpc.connections import SMALL_WINDOW, channel_options
from kvrelay.v1 import common_pb2, decode_node_pb2, decode_node_pb2_grpc

WRK_SECONDS = 10
PROMPTS_AT_A_TIME = 8
RATE_BESIDE_STREAMS = 10.0  # prompts per second, beside streams
NODE_SECONDS = 60.0  # that the fake node may take for all of its answers
WRK_SCRIPT = """
wrk.method = "POST"
wrk.path = "/v1/completions"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [==[{body}]==]
"""


def throughput(url: str, router: int, options: argparse.Namespace) -> list[Figure]:
    """Prints and returns what the router with the process id `router` streams at `url`."""
    before = processor_seconds(router)
    result = whole_run(
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
    protocol = url.partition(":")[0]
    print(
        f"{protocol}, {options.concurrency} streams: {summary.output_tokens_per_second:8.0f} tokens/s, "
        f"{result.tokens_per_piece:.1f} in a piece; of a core, the router took {per_token * 1e6:.1f} us for each "
        f"({1 / per_token:.0f} a second), this client "
        f"{result.client_cpu_seconds / summary.output_tokens * 1e6:.1f} us",
        flush=True,
    )
    return [
        Figure(f"{protocol}: streamed", summary.output_tokens_per_second, "tokens/s"),
        Figure(f"{protocol}: tokens in a piece", result.tokens_per_piece),
        Figure(f"{protocol}: processor time of a token", per_token * 1e6, "us"),
    ]


def request_cost(url: str, name: str, router: int, options: argparse.Namespace) -> list[Figure]:
    """Prints and returns how many prompts of 1,000 tokens the router handles, whose outputs have two."""
    before = processor_seconds(router)
    result = whole_run(
        ThroughputBenchSettings(
            url=url,
            requests=options.requests,
            concurrency=PROMPTS_AT_A_TIME,
            input_len="1000",
            output_len="2",
            tokenizer=options.model,
            progress="off",
        )
    )
    per_second = result.summary.output_tokens_per_second / 2
    per_request = (processor_seconds(router) - before) / options.requests
    print(
        f"{name}, prompts of 1,000 tokens, {PROMPTS_AT_A_TIME} at a time: {per_second:5.0f} requests/s; of a core, the "
        f"router took {per_request * 1e3:.2f} ms for each",
        flush=True,
    )
    return [
        Figure(f"{name}: requests", per_second, "requests/s"),
        Figure(f"{name}: processor time of a request", per_request * 1e3, "ms"),
    ]


def throughput_by_wrk(url: str, options: argparse.Namespace) -> Figure:
    """Prints and returns what wrk measures: it counts whole responses, each of which has a known number of tokens.
    Raises UnavailableError when wrk or a request fails."""
    body = {"model": MODEL, "prompt": [70] * 32, "max_tokens": options.output_len, "temperature": 0, "stream": True}
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(WRK_SCRIPT.replace("{body}", json.dumps(body | {"ignore_eos": True})))
        script.flush()
        command = ["wrk", "-t1", f"-c{options.concurrency}", f"-d{WRK_SECONDS}s", "--timeout", "60s"]
        try:
            done = subprocess.run([*command, "-s", script.name, url], capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            raise UnavailableError("wrk did not end within two minutes") from None
    output = done.stdout
    if done.returncode != 0 or "Non-2xx" in output or "Socket errors:" in output:
        raise UnavailableError(f"wrk failed, or requests did (status {done.returncode}):\n{output}{done.stderr}")
    [line] = [line for line in output.splitlines() if line.startswith("Requests/sec")]
    rate = float(line.split()[1]) * options.output_len
    print(f"http by wrk, {options.concurrency} streams: {rate:8.0f} tokens/s", flush=True)
    return Figure("http by wrk: streamed", rate, "tokens/s")


def ttft(url: str, options: argparse.Namespace, seed: int, prompt_format: Literal["token_ids", "text"]) -> float:
    """Returns the median time to first token of one prompt at a time."""
    result = whole_run(
        LatencyBenchSettings(
            url=url,
            requests=options.ttft_requests,
            input_len="1000",
            output_len="2",
            tokenizer=options.model,
            prompt_format=prompt_format,
            seed=seed,
            progress="off",
        )
    )
    assert result.summary.ttft is not None
    return result.summary.ttft.p50


def ttft_beside_streams(url: str, options: argparse.Namespace) -> list[Figure]:
    """Prints and returns the time to first token while the router streams all that it can."""
    arguments = ["-m", "bench.open_streams", url, "--streams", str(options.concurrency)]
    with child("the process with the streams", arguments) as streams:
        streams.read_line()
        result = whole_run(
            ServeBenchSettings(
                url=url,
                requests=options.ttft_requests * options.rounds,
                request_rate=RATE_BESIDE_STREAMS,
                input_len="1000",
                output_len="2",
                tokenizer=options.model,
                progress="off",
            )
        )
    beside = result.summary.ttft
    assert beside is not None
    print(
        f"http, prompt of 1,000 tokens beside {options.concurrency} streams: TTFT p50 {beside.p50 * 1e3:.1f} ms, "
        f"p99 {beside.p99 * 1e3:.1f} ms",
        flush=True,
    )
    return [
        Figure("http: TTFT beside streams", beside.p50 * 1e3, "ms"),
        Figure("http: TTFT p99 beside streams", beside.p99 * 1e3, "ms"),
    ]


def added_ttft(
    url: str,
    name: str,
    node: str,
    options: argparse.Namespace,
    prompt_format: Literal["token_ids", "text"] = "token_ids",
) -> Figure:
    """Prints the time to first token at `url` and, with token ids, at a decode node itself, measured in turn. Returns
    the difference."""

    pairs = [
        (ttft(url, options, seed, prompt_format), asyncio.run(node_ttft(node, options.ttft_requests)))
        for seed in range(options.rounds)
    ]
    added = statistics.median(routed - straight for routed, straight in pairs)
    routed, straight = (statistics.median(values) for values in zip(*pairs, strict=True))
    print(
        f"{name}, prompt of 1,000 tokens: TTFT p50 {routed * 1e3:.2f} ms, directly at the node "
        f"{straight * 1e3:.2f} ms: the router adds {added * 1e3:.2f} ms",
        flush=True,
    )
    return Figure(f"{name}: added to TTFT", added * 1e3, "ms")


async def node_ttft(address: str, requests: int) -> float:
    """Returns the median time to first token of `requests` requests over one open stream, as the router keeps one.
    Raises UnavailableError when the node does not answer in time."""
    params = common_pb2.SamplingParams(n=1, max_tokens=2, top_p=1.0, repetition_penalty=1.0)
    times: list[float] = []
    async with grpc.aio.insecure_channel(address, options=channel_options(window=SMALL_WINDOW)) as channel:
        stub = cast("decode_node_pb2_grpc.DecodeNodeAsyncStub", decode_node_pb2_grpc.DecodeNodeStub(channel))
        call = stub.Serve(timeout=NODE_SECONDS)
        try:
            for number in range(requests):
                admit = decode_node_pb2.Admit(
                    request_id=str(number),
                    prompt_token_ids=range(300, 1300),
                    sampling_params=params,
                    local_prefill=True,
                )
                started = time.monotonic()
                await call.write(decode_node_pb2.DecodeCommands(commands=[decode_node_pb2.DecodeCommand(admit=admit)]))
                update = await call.read()
                times.append(time.monotonic() - started)
                while not _has_ended(update):  # both tokens may have come together
                    update = await call.read()
        except grpc.RpcError as error:
            raise UnavailableError(f"the fake node does not answer: {error}") from error
        call.cancel()
    return statistics.median(times)


def _has_ended(update: object) -> bool:
    """Tells whether what was read has the last token of the only request. Raises UnavailableError when the stream has
    ended instead."""
    if not isinstance(update, decode_node_pb2.DecodeUpdate):
        raise UnavailableError("the fake node has ended its stream")
    return any(event.tokens.finish_reason for event in update.events)


def router_arguments(options: argparse.Namespace, *nodes: str) -> list[str]:
    profiled = ["-m", "cProfile", "-o", str(options.profile)] if options.profile else []
    flags = ["--port", "0", "--grpc-port", "0", "--served-model-name", MODEL, "--log-level", "warning", "--supervised"]
    return [*profiled, "-m", "router", options.model, *nodes, *flags]


def node_arguments(role: str, options: argparse.Namespace, vocab_size: int) -> list[str]:
    arguments = ["-m", "bench.fake_node", "--role", role, "--vocab-size", str(vocab_size)]
    return [*arguments, "--step-ms", str(options.step_ms)]


def measure_router(options: argparse.Namespace, vocab_size: int) -> list[Figure]:
    """Raises KVRelayError when the node or the router does not start, or a request fails; KeyboardInterrupt
    after Ctrl-C."""
    with child("the fake decode node", node_arguments("decode", options, vocab_size)) as fake_decode:
        decode = fake_decode.read_line()
        with child("the router", router_arguments(options, "--decode-nodes", decode)) as router:
            ready = json.loads(router.read_line())
            figures: list[Figure] = []
            urls = {"http": f"http://{ready['http_address']}", "grpc": f"grpc://{ready['grpc_address']}"}
            for url in urls.values():
                figures += throughput(url, router.process.pid, options)
            if options.wrk:
                figures.append(throughput_by_wrk(urls["http"], options))
            figures += [added_ttft(url, protocol, decode, options) for protocol, url in urls.items()]
            figures.append(added_ttft(urls["http"], "http, text", decode, options, "text"))
            figures += ttft_beside_streams(urls["http"], options)
            figures += request_cost(urls["http"], "http", router.process.pid, options)
        with child("the fake prefill node", node_arguments("prefill", options, vocab_size)) as fake_prefill:
            nodes = ["--decode-nodes", decode, "--prefill-nodes", fake_prefill.read_line()]
            with child("the router", router_arguments(options, *nodes, "--local-prefill-max-tokens", "0")) as router:
                url = f"http://{json.loads(router.read_line())['http_address']}"
                figures.append(added_ttft(url, "http, prefill node", decode, options))
                return [*figures, *request_cost(url, "http, prefill node", router.process.pid, options)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument("model", help="directory of a model; only its tokenizer is read")
    parser.add_argument("--requests", type=positive, default=256, help="streams in all, of each protocol")
    parser.add_argument("--concurrency", type=positive, default=64, help="streams at a time")
    parser.add_argument("--output-len", type=positive, default=256, help="tokens of each stream")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=2.0,
        help="milliseconds between tokens of a stream: the node offers concurrency / step tokens per second",
    )
    parser.add_argument("--ttft-requests", type=positive, default=50, help="prompts of each TTFT median")
    parser.add_argument("--rounds", type=positive, default=5, help="turns that router and node take for TTFT")
    parser.add_argument("--wrk", action="store_true", help="also measure with wrk, which must be installed")
    parser.add_argument("--profile", type=Path, help="write the router's cProfile here (it is much slower then)")
    add_json_file(parser)
    options = parser.parse_args(argv)
    if options.wrk and shutil.which("wrk") is None:
        parser.error("--wrk: there is no program wrk in PATH; install it, or leave --wrk out")
    tokenizer = Path(options.model) / "tokenizer.json"
    if not tokenizer.is_file():
        parser.error(f"there is no {tokenizer}: give the directory of a model")
    print(python_speed(), flush=True)
    try:
        figures = measure_router(options, Tokenizer.from_file(str(tokenizer)).get_vocab_size())
    except KVRelayError as error:
        sys.exit(f"bench.router_throughput: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    write_figures(options.json_file, figures)


if __name__ == "__main__":
    main()
