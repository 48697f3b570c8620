"""The tools of these tests: a judge that finds no error, or a proxy that cannot be cut, would prove nothing."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

import pytest

from tests.chaos.faults import OF_REDIS, Kind, faults
from tests.chaos.load import Load
from tests.chaos.nodes import NODE_NAMES
from tests.chaos.proxy import Proxy
from tests.chaos.report import Report
from tests.chaos.run import note
from tests.chaos.soak import Holdings, growth, leaks
from tests.chaos.streams import Answer, Client
from tests.chaos.verdict import Verdict, differences, judge
from tests.e2e.processes import PATIENCE_SECONDS, processes_of, wait_until

ROOT = Path(__file__).parent.parent.parent
TOKENS = random.Random(1).sample(range(2000), 40)


def answer(tokens: list[int], *, finish: str = "LENGTH", **fields: object) -> Answer:
    found = Answer(outputs={0: list(tokens)}, finish_reasons={0: finish} if finish else {}, complete=True)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (answer(TOKENS), Verdict.RIGHT),
        (answer(TOKENS[:17], finish="", left=True), Verdict.RIGHT),
        (answer([], finish="", left=True, outputs={}), Verdict.RIGHT),
        (answer(TOKENS, error="UNAVAILABLE"), Verdict.FAILED),
        (answer([*TOKENS[:20], 2001, *TOKENS[21:]]), Verdict.DIFFERENT),
        (answer([*TOKENS[:20], *TOKENS[18:38]]), Verdict.SHIFTED),
        (answer([*TOKENS[:20], *TOKENS[21:]]), Verdict.SHIFTED),
        (answer([*TOKENS, 5]), Verdict.SHIFTED),
        (answer(TOKENS[:39]), Verdict.SHIFTED),
        (answer(TOKENS, finish="STOP"), Verdict.SHIFTED),
        (answer(TOKENS, logprobs={0: [-1.0] * 40}), Verdict.DIFFERENT),
    ],
)
def test_every_deviation_from_the_expected_stream_has_its_verdict(found: Answer, verdict: Verdict) -> None:
    assert judge(found, answer(TOKENS))[0] is verdict


def test_logprobs_are_compared() -> None:
    expected = answer(TOKENS, logprobs={0: [-1.0] * 40})
    assert judge(answer(TOKENS, logprobs={0: [-1.0001] * 40}), expected)[0] is Verdict.RIGHT
    assert judge(answer(TOKENS, logprobs={0: [-1.0] * 39 + [-1.1]}), expected)[0] is Verdict.DIFFERENT
    assert judge(answer(TOKENS, logprobs={0: [-1.0] * 39}), expected)[0] is Verdict.SHIFTED


def test_answers_are_compared_in_all_that_a_client_sees() -> None:
    expected = {"a": answer(TOKENS, logprobs={0: [-1.0] * 40}), "b": answer(TOKENS)}
    assert differences(expected, expected) == []
    found = {"a": answer(TOKENS, logprobs={0: [-1.1] * 40}), "b": answer(TOKENS, finish="STOP")}
    assert [difference.split(":")[0] for difference in differences(found, expected)] == [
        "a is different",
        "b is duplicate or gap",
    ]


def test_an_output_that_goes_on_after_its_end_has_failed() -> None:
    found = answer(TOKENS)
    found.add(0, [1], "")
    assert judge(found, answer(TOKENS))[0] is Verdict.FAILED


def test_only_a_request_without_output_counts_as_refused() -> None:
    told = "UNAVAILABLE: no decode node can serve now: decode-0 is lost"
    assert answer([], outputs={}, error=told).refused
    assert not answer(TOKENS[:3], error=told).refused
    assert not answer([], outputs={}, error="UNAVAILABLE: no decode node came that could go on within 120.0 s").refused


def test_a_refusal_while_a_decode_node_lives_is_a_problem() -> None:
    load = Load(cast("Client", None), (), {}, seed=1, aborts=0.0)
    load.report.refusals += [10.5, 20.0, 31.0]
    for without_decode, number in (([(10.0, 12.0), (19.0, 30.0)], 0), ([(10.0, 12.0), (31.5, 40.0)], 2), ([], 3)):
        report = Report("chaos", "shared_memory", seed=1)
        note(load, report, without_decode=without_decode)
        assert report.refused_requests == 3
        assert report.problems == [f"{number} requests were refused while a decode node lived"] * (number > 0)


@pytest.mark.asyncio(loop_scope="session")  # the proxies of other tests' cluster must not stand still meanwhile
async def test_chaos_that_is_told_to_end_leaves_no_stopped_process(tmp_path: Path) -> None:
    await asyncio.to_thread(end_chaos_with_stopped_nodes, tmp_path)


def end_chaos_with_stopped_nodes(directory: Path) -> None:
    def nodes() -> list[int]:
        return [process for model in directory.glob("*/demo-model") for process in processes_of(model)]

    command = [sys.executable, "-m", "tests.chaos", "--connector", "shared_memory"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(directory)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, cwd=ROOT) as chaos:
        try:
            wait_until(lambda: len(nodes()) == len(NODE_NAMES), lambda: "not all nodes are started")
            for node in nodes():
                os.kill(node, signal.SIGSTOP)
            chaos.terminate()
            chaos.wait(PATIENCE_SECONDS)
            assert nodes() == []
        finally:
            chaos.kill()
            for node in nodes():
                os.kill(node, signal.SIGKILL)


@pytest.mark.parametrize("with_redis", [False, True])
def test_a_seed_decides_the_faults(with_redis: bool) -> None:
    def first_faults(seed: int) -> list[object]:
        return list(islice(faults(seed, with_redis=with_redis, most_after=1.0, most_seconds=5.0), 40))

    assert first_faults(1) == first_faults(1) != first_faults(2)
    kinds = set(Kind) if with_redis else set(Kind) - set(OF_REDIS)
    first = islice(faults(1, with_redis=with_redis, most_after=1.0, most_seconds=5.0), len(kinds))
    assert Counter(fault.kind for fault in first) == dict.fromkeys(kinds, 1)


def test_what_a_process_holds_more_in_the_second_half_of_a_soak_is_a_leak() -> None:
    own = Holdings.of(os.getpid())
    assert own.memory > 1 << 20 and own.files > 2 and own.threads >= 1
    filled = replace(own, memory=own.memory + (64 << 20), files=own.files + 100, threads=own.threads + 100)
    assert leaks([{"router": own}, {"router": filled}, {"router": filled}]) == []
    assert growth([{"router": own}, {"router": filled}, {"router": filled}]) == {"router": 0}
    for change in ({"memory": filled.memory}, {"files": filled.files}, {"threads": filled.threads}):
        grown = replace(own, **change)
        assert (
            len(leaks([{"router": own, "node": own}, {"router": own, "node": own}, {"router": own, "node": grown}]))
            == 1
        )


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """Yields the port of a server that sends back what it gets."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_the_proxy_passes_on_falls_silent_and_cuts(echo: int) -> None:
    proxy = Proxy(echo)
    await proxy.start()
    host, port = proxy.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(10):
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        proxy.silence()
        writer.write(b"two")
        answered = asyncio.create_task(reader.readexactly(3))
        assert not (await asyncio.wait({answered}, timeout=0.1))[0]
        proxy.speak()
        assert await answered == b"two"
        proxy.cut()
        connected = asyncio.create_task(proxy.wait_connected())
        assert await reader.read() == b""
        assert not connected.done()
        again, other = await asyncio.open_connection(host, int(port))
        other.write(b"three")
        assert await again.readexactly(5) == b"three"
        await connected
    for end in (writer, other):
        end.close()
    await proxy.close()


async def test_a_connection_to_a_dead_node_is_closed_at_once() -> None:
    async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as server:
        port: int = server.sockets[0].getsockname()[1]
    proxy = Proxy(port)
    await proxy.start()
    host, listening = proxy.address.split(":")
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(host, int(listening))
        assert await reader.read() == b""
    writer.close()
    await proxy.close()
