"""Every benchmark script of `bench/` runs with a tiny model, prints what it is for, and gives the suite of targets the
figures that it asks for. Times are never looked at."""

import argparse
import asyncio
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
import torch
from paged_kernels.cpu.threads import threads_kept

from bench import (
    connectors,
    decode_step,
    first_decode_step,
    gpu_suite,
    kernel_speed,
    linear_speed,
    node_startup,
    prefill_step,
    random_model,
    router_throughput,
    sampling_speed,
    serve_vs_generate,
    step_overhead,
)
from bench.beyond_cache import beyond_cache_bytes
from bench.child import child
from bench.cpu.targets import MEASUREMENTS
from bench.figures import read_figures
from bench.random_model import write_random_model
from bench.whole_run import whole_run
from kvrelay.bench.settings import LatencyBenchSettings, ThroughputBenchSettings
from kvrelay.core.errors import UnavailableError
from kvrelay.v1 import common_pb2, decode_node_pb2, decode_node_pb2_grpc
from tests.bench.servers import DONE, LAST, PIECE, USAGE, answering, in_a_thread
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "demo" / "model")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_random_model(tmp_path_factory.mktemp("models") / "tiny", "tiny"))


@pytest.fixture(autouse=True)
def threads_of_the_tests() -> Iterator[None]:
    """Restores the number of threads, which scripts set in their process, and that is ours."""
    with threads_kept():
        yield


def check(shown: str, *labels: str) -> None:
    for label in labels:
        assert label in shown


def check_figures(path: Path, measurement: str, *, instead: dict[str, str] | None = None, without: str = "no") -> None:
    """Checks that a file has the figures that the suite shows of a measurement. `instead` has what a script that was
    told to do something smaller writes in place of parts of their names; those that begin with `without` are left out.
    """
    [targets] = [one.targets for one in MEASUREMENTS if one.name == measurement]
    names = {target.figure for target in targets if not target.figure.startswith(without)}
    for text, other in (instead or {}).items():
        names = {name.replace(text, other) for name in names}
    figures = {figure.name: figure.value for figure in read_figures(path)}
    assert names and names <= figures.keys()
    assert all(value > 0 or name.endswith("added to TTFT") for name, value in figures.items())


@pytest.mark.parametrize(
    ("main", "command", "defaults"),
    [
        (kernel_speed.main, "kernel_speed", ("1:4096 16:512 16:2048", "bfloat16", "14")),
        (random_model.main, "random_model", ("qwen2-0.5b", "0")),
        (connectors.main, "connectors", ("256", "'128 KiB' '2 MiB'")),
    ],
)
def test_help_has_the_command_and_the_defaults(
    main: Callable[[Sequence[str]], object], command: str, defaults: tuple[str, ...], capsys: Capture
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    check(shown, f"usage: python -m bench.{command} [-h]", *(f"(default: {default})" for default in defaults))
    assert not any(f"(default: {unset}" in shown for unset in ("None", "False", "=="))


def test_decode_step(tmp_path: Path, capsys: Capture) -> None:
    forms = ["none", "shared", "int8", "int4", "awq"]
    path = tmp_path / "figures.json"
    small = ["--shape", "small", "--batch", "2", "--context", "20", "--rounds", "1", "--json-file", str(path)]
    decode_step.main([*small, "--weights", *forms])
    check_figures(path, "decode-step", instead={"batch 1,": "batch 2,"})
    shown = capsys.readouterr().out
    check(shown, "small, 20 tokens of KV each", "batch   2: memory read", *(f"loaded as {form} in" for form in forms))
    check(
        shown,
        *(f"  {form:6} " for form in ("bf16", "shared", "int8", "int4", "awq")),
        "of bf16; ",
        "of the read bandwidth",
    )


def test_step_overhead(tiny: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "steps.json"
    sampling = ["--temperature", "1", "--top-k", "9", "--top-p", "0.9", "--logprobs", "2"]
    sampling += ["--repetition-penalty", "1.1", "--min-tokens", "20"]
    short = ["--steps", "2", "--prompt-len", "8"]
    step_overhead.main([tiny, "--batch", "1", "3", *short, *sampling, "--json-file", str(path)])
    shown = capsys.readouterr().out
    check(shown, "Python here and now: ", "| model | batch | schedule ms |", "| tiny | 1 |", "| tiny | 3 |")
    instead = {"model,": "tiny,", "qwen2-0.5b,": "tiny,", "batch 16": "batch 3"}
    check_figures(path, "step-overhead", instead=instead)
    parts = ("schedule", "inputs", "forward", "sampling", "results", "step")
    assert {f"tiny, batch 1: {part}" for part in parts} <= {figure.name for figure in read_figures(path)}


def test_kernel_speed(capsys: Capture) -> None:
    small = ["--threads", "1", "--repeats", "1", "--rounds", "1"]
    kernel_speed.main(["--fp8", "--decode", "2:20", "--copies", "2", "--prefill", "8", *small])
    shown = capsys.readouterr().out
    check(shown, "memory read: ", "decode    2 x    20 bfloat16:", "decode    2 x    20      fp8:", "prefill     8:")


def test_what_no_cache_holds(tmp_path: Path) -> None:
    assert beyond_cache_bytes(tmp_path) == 256 << 20
    for index, size in enumerate(("48K", "2048K", "307200K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert beyond_cache_bytes(tmp_path) == 600 << 20


def test_linear_speed(capsys: Capture) -> None:
    linear_speed.main(["--rows", "1", "3", "--threads", "1", "--rounds", "1", "--copies", "1"])
    shown = capsys.readouterr().out
    check(shown, "    1 x   896 x  1152:", "    3 x  4864 x   896:")
    assert shown.count("TFLOP/s") == 8


def test_sampling_speed(capsys: Capture) -> None:
    sampling_speed.main(["--batch", "2", "--vocab-size", "300", "--threads", "1", "--rounds", "1"])
    shown = capsys.readouterr().out
    check(shown, "flat, top-p 0.95:", "peaked, log-probabilities of a token and the 5 likeliest:")
    assert shown.count("of its time") == 12


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_prefill_step(quantization: str, tiny: str, capsys: Capture) -> None:
    steps = ["--steps", "20:0", "2*1:20,8:0"]
    prefill_step.main([tiny, *steps, "--threads", "1", "--rounds", "1", "--quantization", quantization])
    shown = capsys.readouterr().out
    check(shown, " 20:0: ", " 2*1:20,8:0: ")
    assert quantization == "none" or shown.count("with bfloat16") == 2


def test_first_decode_step(tiny: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "figures.json"
    small = ["--prompt-len", "40", "--requests", "1", "--output-len", "64"]
    first_decode_step.main([tiny, *small, "--json-file", str(path)])
    check_figures(path, "first-decode-step", instead={"1500 ": "40 ", "512 ": "40 ", "128 ": "40 "})
    check(capsys.readouterr().out, "Python here and now: ", "40 prompt tokens: hand-over ", "first gap ")


def test_connectors(tmp_path: Path) -> None:
    """Runs the script in a process of its own, like the one it fetches from."""
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.connectors", "--megabytes", "4", "--turns", "1", "--sizes", "128 KiB"]
    command += ["--json-file", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    check(
        done.stdout,
        "shared_memory  128 KiB: ",
        "GB/s, plain copy ",
        "shared_memory  128 KiB: median ratio ",
        ", 1 turns)",
    )
    has_ucx = importlib.util.find_spec("ucxx") is not None
    assert ("bare ucxx" in done.stdout) == has_ucx
    check_figures(path, "connectors", instead={"2 MiB": "128 KiB"}, without="no" if has_ucx else "ucx")


async def test_what_has_come_from_redis_is_compared(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    place = connectors.Place("128 KiB", 2, torch.device("cpu"))
    assert (await connectors.redis(place, redis_server.url)).value > 0
    check(capsys.readouterr().out, "redis          128 KiB: ")
    monkeypatch.setattr(connectors, "fetch_rate", AsyncMock(return_value=1.0))  # it leaves the pool as it is
    with pytest.raises(SystemExit, match="redis on cpu: wrong bytes arrived"):
        await connectors.redis(place, redis_server.url)


def test_router_throughput(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "figures.json"
    load = ["--requests", "4", "--concurrency", "2", "--output-len", "4"]
    router_throughput.main([DEMO, *load, "--ttft-requests", "2", "--rounds", "1", "--json-file", str(path)])
    check_figures(path, "router", without="http by wrk")
    shown = capsys.readouterr().out
    for protocol in ("http", "grpc"):
        check(shown, f"{protocol}, 2 streams: ")
    for prompt in ("http", "grpc", "http, text", "http, prefill node"):
        check(shown, f"\n{prompt}, prompt of 1,000 tokens: TTFT p50 ")
    for nodes in ("http", "http, prefill node"):
        check(shown, f"\n{nodes}, prompts of 1,000 tokens, 8 at a time: ")
    check(shown, "\nhttp, prompt of 1,000 tokens beside 2 streams: TTFT p50 ")
    check(shown, "Python here and now: ")


def test_serve_vs_generate(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "result.json"
    assert serve_vs_generate.main(["--quick", "--topologies", "0p+1d", "--json-file", str(path)]) == 0
    check(capsys.readouterr().out, "tiny bfloat16, ", "  0P+1D     ", "  generate  ", "  0P+1D / generate = ")
    assert list(json.loads(path.read_text())["clusters"]) == ["0P+1D"]


def test_node_startup(tiny: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "figures.json"
    node_startup.main([tiny, "--runs", "1", "--warmup", "0", "--threads", "1", "--json-file", str(path)])
    check_figures(path, "node-startup")
    check(capsys.readouterr().out, "tiny: ready after ", " s (median of 1; ")


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (prefill_step.main, [DEMO, "--steps", "foo"], "'foo': write NEW:CACHED tokens, like 512:0"),
        (prefill_step.main, [DEMO, "--steps", "5000:0"], "'5000:0': a sequence has at most 4096 tokens"),
        (kernel_speed.main, ["--decode", "16x512"], "'16x512': write SEQUENCES:TOKENS, like 16:512"),
        (decode_step.main, ["--shape", "tiny", "--weights", "awq"], "--weights: the sizes of the shape tiny are not"),
        (router_throughput.main, [DEMO, "--wrk"], "--wrk: there is no program wrk in PATH"),
        (router_throughput.main, ["/nowhere"], "there is no /nowhere/tokenizer.json: give the directory of a model"),
        (node_startup.main, ["/nowhere"], "there is no config.json in /nowhere"),
        (connectors.main, ["--turns", "0"], "argument --turns: '0': write a whole number of at least 1"),
        (decode_step.main, ["--context", "0"], "argument --context: '0': write a whole number of at least 1"),
        (decode_step.main, ["--context", "5000"], "--context: a sequence has at most 4096 tokens"),
        (first_decode_step.main, [DEMO, "--requests", "0"], "argument --requests: '0': write a whole number"),
        (gpu_suite.main, ["--repeats", "0"], "argument --repeats: '0': write a whole number of at least 1"),
        (kernel_speed.main, ["--repeats", "0"], "argument --repeats: '0': write a whole number of at least 1"),
        (linear_speed.main, ["--rows", "1", "0"], "argument --rows: '0': write a whole number of at least 1"),
        (linear_speed.main, ["--copies", "x"], "argument --copies: 'x': write a whole number of at least 1"),
        (node_startup.main, [DEMO, "--runs", "0"], "argument --runs: '0': write a whole number of at least 1"),
        (prefill_step.main, [DEMO, "--threads", "-1"], "argument --threads: '-1': write a whole number of at least 1"),
        (router_throughput.main, [DEMO, "--rounds", "0"], "argument --rounds: '0': write a whole number of at least 1"),
        (step_overhead.main, [DEMO, "--batch", "0"], "argument --batch: '0': write a whole number of at least 1"),
        (step_overhead.main, [DEMO, "--batch", "65"], "has at most 64 sequences"),
        (step_overhead.main, [DEMO, "--steps", "5000"], "they add up to at most 4084"),
        (random_model.main, ["/nowhere", "--shape", "tiny", "--quantization", "awq"], "choose another --shape"),
    ],
)
def test_arguments_that_can_not_be_are_explained(
    main: Callable[[Sequence[str]], None],
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("main", [prefill_step.main, step_overhead.main])
def test_a_directory_without_a_model_is_told(main: Callable[[Sequence[str]], None], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"^bench\.\w+_\w+: .*{tmp_path}"):
        main([str(tmp_path)])


def test_sampling_that_can_not_be_is_explained(tiny: str) -> None:
    with pytest.raises(SystemExit, match=r"^bench\.step_overhead: top_p must be in"):
        step_overhead.main([tiny, "--top-p", "2"])


def test_sequences_that_end_before_all_have_begun_are_no_measurement() -> None:
    with pytest.raises(SystemExit, match="the first of 2 sequences ended too early: lower --batch, --prompt-len"):
        step_overhead.main([DEMO, "--batch", "2", "--prompt-len", "4083", "--steps", "1"])


def test_an_owner_of_blocks_whom_nobody_reads_leaves_no_pool() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "bench.connectors", "--own", "128 KiB", "--megabytes", "4"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, text=True
    ) as owner:
        os.close(writer)
        _, errors = owner.communicate()
    assert "BrokenPipeError" in errors
    assert not list(Path("/dev/shm").glob(f"kvrelay-*-{owner.pid}-*"))


def test_a_load_that_was_cut_off_has_no_result() -> None:
    bodies: list[dict[str, Any]] = []

    def press() -> None:
        while not bodies:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with in_a_thread(answering((PIECE, LAST, USAGE, DONE), bodies=bodies)) as url:
        pressing = threading.Thread(target=press, daemon=True)
        pressing.start()
        load = LatencyBenchSettings(url=url, requests=100_000, input_len="8", output_len="5", vocab_size=4096)
        with pytest.raises(KeyboardInterrupt):
            whole_run(load)
        pressing.join()


def test_too_few_requests_are_told(capsys: Capture) -> None:
    with in_a_thread(answering((PIECE, LAST, USAGE, DONE))) as url:
        load = {"requests": 2, "concurrency": 3, "input_len": "8", "output_len": "5", "vocab_size": 4096}
        whole_run(ThroughputBenchSettings.model_validate({"url": url, **load}))
    check(capsys.readouterr().out, "not those of the load that was asked for: too few")


@pytest.mark.parametrize(
    "said", ["Socket errors: connect 0, read 7, write 0, timeout 1", "Non-2xx or 3xx responses: 3"]
)
def test_requests_of_wrk_that_fail_are_a_failure(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrk = tmp_path / "wrk"
    wrk.write_text(f"#!/bin/sh\necho '  {said}'\necho 'Requests/sec:     57.30'\n")
    wrk.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    options = argparse.Namespace(concurrency=2, output_len=4)
    with pytest.raises(UnavailableError, match=said):
        router_throughput.throughput_by_wrk("http://127.0.0.1:1", options)
    wrk.write_text("#!/bin/sh\necho 'Requests/sec:     57.50'\n")
    assert router_throughput.throughput_by_wrk("http://127.0.0.1:1", options).value == 230.0


def test_ctrl_c_ends_a_script_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_throughput, "measure_router", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        router_throughput.main([DEMO])
    assert ended.value.code == 130
    monkeypatch.setattr(serve_vs_generate, "run", Mock(side_effect=KeyboardInterrupt))
    assert serve_vs_generate.main([]) == 130


async def test_the_fake_node_keeps_its_pace_while_requests_arrive() -> None:
    def admit(request_id: str, max_tokens: int) -> decode_node_pb2.DecodeCommands:
        params = common_pb2.SamplingParams(n=1, max_tokens=max_tokens)
        message = decode_node_pb2.Admit(request_id=request_id, sampling_params=params, local_prefill=True)
        return decode_node_pb2.DecodeCommands(commands=[decode_node_pb2.DecodeCommand(admit=message)])

    arguments = ["-m", "bench.fake_node", "--role", "decode", "--vocab-size", "2048", "--step-ms", "50"]
    with child("the fake node", arguments) as node:
        async with grpc.aio.insecure_channel(node.read_line()) as channel:
            stub = cast("decode_node_pb2_grpc.DecodeNodeAsyncStub", decode_node_pb2_grpc.DecodeNodeStub(channel))
            call = stub.Serve(timeout=30)
            await call.write(admit("it", 3))

            async def arrive() -> None:
                for number in itertools.count():
                    await call.write(admit(str(number), 1))
                    await asyncio.sleep(0.005)

            arriving = asyncio.create_task(arrive())
            async for update in call:
                if any(event.request_id == "it" and event.tokens.finish_reason for event in update.events):
                    break
            else:
                pytest.fail("the stream has ended")
            arriving.cancel()
            call.cancel()


def test_a_router_that_does_not_start_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((Path(DEMO) / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("no JSON")
    with pytest.raises(SystemExit, match="the router ended before it was ready; its messages are above"):
        router_throughput.main([str(tmp_path)])


def test_a_child_that_says_nothing_is_given_up() -> None:
    with child("it", ["-c", "input()"]) as silent, pytest.raises(UnavailableError, match=r"it has printed nothing for"):
        silent.read_line(0.1)
    assert silent.process.returncode is not None
