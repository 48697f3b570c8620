"""What a load offers and whether a server keeps up with it: whole runs of a server in this process, in virtual time."""

import asyncio
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrelay.bench.arrivals import gamma_arrivals
from kvrelay.bench.base import Answer, Failure, Prompt, RequestRecord, Send
from kvrelay.bench.knee import find_knee
from kvrelay.bench.load import MAX_READY
from kvrelay.bench.offered import Offered
from kvrelay.bench.plan import Plan, plans_of
from kvrelay.bench.prompts import PromptBuilder, Vocabulary
from kvrelay.bench.report import render, render_sweep
from kvrelay.bench.result import RunResult
from kvrelay.bench.run import Runner
from kvrelay.bench.settings import BenchSettings, LatencyBenchSettings, ServeBenchSettings, SweepBenchSettings
from kvrelay.bench.workloads import STEADY, Session
from tests.bench.records import record, run_of
from tests.simulation.virtual_loop import VirtualClock, VirtualLoop, run_virtual

EVER = 10**9
SHORT: dict[str, Any] = {"input_len": "8", "output_len": "10"}


class Server:
    """A client of a server that has `places` for requests. One token takes `step` seconds, and `more` for each request
    that runs; the client takes `encoding` seconds to make a request."""

    def __init__(self, *, places: int, step: float, more: float = 0.0, encoding: float = 0.0) -> None:
        self._places = asyncio.Semaphore(places)
        self._step = step
        self._more = more
        self._encoding = encoding
        self._num_running = 0

    async def resolve_model(self, wanted: str) -> str:
        return wanted

    async def prepare(self, prompt: Prompt, max_tokens: int) -> Send:
        await asyncio.sleep(self._encoding)
        return partial(self._answer, max_tokens)

    async def _answer(self, max_tokens: int, answer: Answer) -> None:
        now = asyncio.get_running_loop().time
        answer.sent = now()
        async with self._places:
            self._num_running += 1
            for _ in range(max_tokens):
                await asyncio.sleep(self._step + self._more * self._num_running)
                answer.arrivals.append(now())
            self._num_running -= 1
        answer.finished = now()

    async def close(self) -> None:
        """Does nothing: there is no connection."""


class RefusingServer(Server):
    """A server that refuses the first request."""

    _has_refused = False

    async def _answer(self, max_tokens: int, answer: Answer) -> None:
        await super()._answer(max_tokens, answer)
        if not self._has_refused:
            self._has_refused, answer.failure = True, Failure("http 429", "")


def results_of(
    settings: BenchSettings, make_server: Callable[[], Server], *, cut_at: float | None = None
) -> list[RunResult]:
    """Returns every plan's result, each of a server of its own and from the time 0 on; Ctrl-C comes at `cut_at`."""
    found: list[RunResult] = []

    async def run(plan: Plan, loop: VirtualLoop) -> None:
        builder = PromptBuilder(Vocabulary.of_size(4096), "token_ids", seed=settings.seed)
        interrupted = asyncio.Event()
        if cut_at is not None:
            loop.call_later(cut_at, interrupted.set)
        runner = Runner(make_server(), builder, VirtualClock(), settings.slos, interrupted, False)
        found.append(await runner.measure(plan))

    for plan in plans_of(settings):
        run_virtual(partial(run, plan))
    return found


def twenty_per_second() -> Server:
    return Server(places=4, step=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_a_rate_that_the_server_cannot_keep_up_with_is_no_knee(seed: int) -> None:
    """However short the run, and although the answers of so few requests still meet the SLO."""
    settings = SweepBenchSettings(request_rates=(2, 8, 40, 128), slo=("ttft=2000",), seed=seed, **SHORT)
    results = results_of(settings, twenty_per_second)
    assert [result.summary.goodput and result.summary.goodput.attainment for result in results] == [1.0] * 4
    assert [result.flaws for result in results] == [(), (), ("not sustained",), ("not sustained",)]
    knee = find_knee(results, 0.9)
    assert knee is results[1]
    table = render_sweep(results, knee, settings.slos, 0.9)
    assert "128/s: the server did not keep up: the last quarter of the requests took more than twice as long" in table


@pytest.mark.parametrize("places", [3, EVER], ids=["queue", "no-queue"])
@pytest.mark.parametrize("more", [{"requests": 100}, {"requests": 16}, {"output_len": "1-20"}, {"burstiness": 4.0}])
def test_a_server_that_keeps_up_has_no_flaw(places: int, more: dict[str, Any]) -> None:
    settings = ServeBenchSettings(request_rate=10.0, **SHORT | more)
    [result] = results_of(settings, lambda: Server(places=places, step=0.02))
    assert result.flaws == ()


@pytest.mark.parametrize("requests", [2, 5, 32, 300])
@pytest.mark.parametrize(("output_len", "seed"), [("10", 0), ("5-15", 0), ("5-15", 1), ("5-15", 2)])
def test_a_run_that_is_shorter_than_its_answers_has_too_few_requests(requests: int, output_len: str, seed: int) -> None:
    settings = ServeBenchSettings(
        request_rate=requests / 2, requests=requests, seed=seed, **SHORT | {"output_len": output_len}
    )
    [result] = results_of(settings, lambda: Server(places=EVER, step=2.0))
    assert result.flaws == ("too few",)
    left = f"when the last one arrived, {requests} of {requests} had not ended: too few to show whether"
    assert left in render(result, None)


def test_a_load_that_shows_nothing_of_the_server_is_no_knee() -> None:
    """It is shorter than its answers, or arrives all at once: any server bears that for a while."""
    for rates, expected in (((1, 64), "1/s"), ((1, math.inf), "1/s"), ((64,), None), ((math.inf,), "inf/s")):
        settings = SweepBenchSettings(request_rates=rates, slo=("e2e=2000",), **SHORT)
        results = results_of(settings, lambda: Server(places=EVER, step=0.1))
        assert all(result.summary.goodput and result.summary.goodput.attainment == 1.0 for result in results)
        knee = find_knee(results, 0.9)
        assert (knee and knee.label) == expected


def test_a_server_that_takes_more_at_a_time_as_they_come_keeps_up() -> None:
    settings = ServeBenchSettings(request_rate=20.0, requests=100, **SHORT)
    [result] = results_of(settings, lambda: Server(places=EVER, step=0.02, more=0.002))
    assert result.summary.itl is not None and result.summary.itl.max > 0.03 and result.flaws == ()


@pytest.mark.parametrize("more", [{"concurrency": 4}, {"workload": "multi-turn", "turns": 3}])
def test_waiting_for_a_place_and_later_turns_count_too(more: dict[str, Any]) -> None:
    settings = ServeBenchSettings(request_rate=40.0, **SHORT, **more)
    [result] = results_of(settings, twenty_per_second)
    assert result.flaws == ("not sustained",)
    assert result.offered is not None and result.offered.num_arrived == 32


def test_a_client_that_does_not_fill_the_places_is_late() -> None:
    """Although others had to wait for theirs before."""
    for encoding, flaws, delay, mean_running in ((0.15, ("client late",), 0.9, 2.9), (0.01, (), 0.0, 7.7)):
        settings = ServeBenchSettings(concurrency=8, requests=100, **SHORT)
        [result] = results_of(settings, partial(Server, places=EVER, step=0.03, encoding=encoding))
        assert result.limit_was_reached and result.flaws == flaws
        assert result.summary.latest_start == pytest.approx(delay), "counted from when the place became free"
        assert result.summary.mean_running == pytest.approx(mean_running, abs=0.1)


def test_a_later_turn_that_the_client_sends_late_waited_for_no_place() -> None:
    for encoding, flaws in ((0.15, ("client late",)), (0.01, ())):
        settings = ServeBenchSettings(workload="multi-turn", turns=3, concurrency=3, requests=6, **SHORT)
        [result] = results_of(settings, partial(Server, places=EVER, step=0.03, encoding=encoding))
        assert result.limit_was_reached and (result.longest_wait, result.flaws) == (0.0, flaws)
        assert result.summary.latest_start == pytest.approx(encoding)


def test_a_wait_for_a_place_is_not_the_clients_delay() -> None:
    settings = ServeBenchSettings(request_rate=10.0, burstiness=0.2, concurrency=4, requests=64, **SHORT)
    [result] = results_of(settings, lambda: Server(places=EVER, step=0.03))
    longest = max(record.sent - record.scheduled for record in result.records)
    assert (result.longest_wait, result.summary.latest_start) == (longest, 0.0) and longest > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        ServeBenchSettings(concurrency=4, **SHORT),
        ServeBenchSettings(request_rate=math.inf, **SHORT),
        ServeBenchSettings(workload="mixed", streams=9, duration=5.0, long_every=0.1, **SHORT),
        ServeBenchSettings(request_rate=1.0, requests=1, **SHORT),
        LatencyBenchSettings(**SHORT),
    ],
    ids=["concurrency", "at-once", "mixed", "one", "latency"],
)
def test_other_loads_offer_nothing_at_a_rate(settings: BenchSettings) -> None:
    [result] = results_of(settings, twenty_per_second)
    assert (result.offered, result.flaws) == (None, ())


def test_the_rate_that_was_drawn_is_told_beside_the_one_that_was_asked_for() -> None:
    settings = SweepBenchSettings(request_rates=(2, 4), seed=1, **SHORT)
    results = results_of(settings, twenty_per_second)
    drawn = [31 / list(itertools.islice(gamma_arrivals(rate, seed=1), 32))[-1] for rate in (2, 4)]
    assert drawn == pytest.approx([2.525, 5.05], abs=0.001)
    offered = [result.offered for result in results if result.offered is not None]
    assert [one.rate for one in offered] == pytest.approx(drawn) and [one.asked_rate for one in offered] == [2.0, 4.0]
    head, *rows = render_sweep(results, None, None, 0.9).splitlines()
    assert [row.split()[:2] for row in (head, *rows[:2])] == [["load", "offered"], ["2/s", "2.53"], ["4/s", "5.05"]]
    note = "2.53 requests or conversations arrived per second, drawn for the 2 that were asked for"
    assert note in render(results[0], None)


def trace_of(*times: int, folder: Path) -> Path:
    """Writes a trace of requests at these milliseconds, in this order."""
    trace = folder / "trace.jsonl"
    lines = ({"timestamp": at, "input_length": 8, "output_length": 4, "hash_ids": [at]} for at in times)
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return trace


def test_a_trace_offers_its_own_rate(tmp_path: Path) -> None:
    trace = trace_of(0, 900, 500, folder=tmp_path)
    [result] = results_of(ServeBenchSettings(workload="trace", trace=trace, speedup=2.0), twenty_per_second)
    assert result.offered == Offered(2 / 0.45, None, num_arrived=3, num_unfinished=1, was_sustained=True)
    assert "4.44 requests or conversations arrived per second\n" in render(result, None)


def test_a_request_is_sent_at_its_time_however_many_later_ones_stand_before_it_in_a_trace(tmp_path: Path) -> None:
    trace = trace_of(0, *range(1000, 1000 + MAX_READY), 500, folder=tmp_path)
    [result] = results_of(ServeBenchSettings(workload="trace", trace=trace), lambda: Server(places=EVER, step=0.02))
    assert result.summary.latest_start == 0.0


def test_a_stream_that_was_refused_asks_again_after_a_second() -> None:
    settings = ServeBenchSettings(workload="mixed", streams=1, duration=5.0, long_every=60.0, **SHORT)
    [result] = results_of(settings, lambda: RefusingServer(places=EVER, step=0.02))
    refused, again, *_ = (one for one in result.records if one.kind == STEADY)
    assert refused.failure is not None and again.failure is None
    assert again.sent - refused.finished == 1.0


def test_what_had_not_arrived_at_an_interrupt_was_not_offered() -> None:
    settings = ServeBenchSettings(request_rate=2.0, requests=100, **SHORT)
    [plan], [result] = plans_of(settings), results_of(settings, lambda: Server(places=EVER, step=0.1), cut_at=10.0)
    times = [session.at for session in plan.sessions if session.at <= 10.0]
    unfinished = sum(at + 1.0 > times[-1] for at in times)
    assert result.was_cut and 0 < unfinished < len(times) < 100
    assert result.offered == Offered((len(times) - 1) / times[-1], 2.0, len(times), unfinished, was_sustained=True)


def test_an_interrupt_ends_the_time_over_which_rates_are_taken() -> None:
    settings = ServeBenchSettings(workload="mixed", streams=2, duration=60.0, **SHORT)
    [result] = results_of(settings, twenty_per_second, cut_at=10.0)
    assert result.was_cut and result.summary.seconds == pytest.approx(10.0)


def each_second(*taken: float) -> tuple[list[Session], list[RequestRecord]]:
    """Returns sessions and records of requests that arrived every second and took so many."""
    sessions = [Session(float(at), []) for at in range(len(taken))]
    return sessions, [record(at + took, scheduled=float(at), sent=float(at)) for at, took in enumerate(taken)]


def test_requests_that_failed_show_nothing() -> None:
    """Such as those that an overloaded server refuses."""
    sessions, slower = each_second(*range(1, 33))
    refused = [replace(one, failure=Failure("http 429", "")) for one in slower]
    for records, was_sustained in ((slower, False), (refused, True), (slower[:8] + refused[8:], True)):
        found = Offered.of(sessions, records, asked_rate=1.0)
        assert found is not None and found.was_sustained == was_sustained
        assert run_of(*records, offered=found).flaws == (() if was_sustained else ("not sustained",))


def test_a_request_has_not_ended_before_it_has_failed() -> None:
    """Although nothing came for a long time."""
    sessions, quick = each_second(0.5, 0.5, 0.5)
    hung = replace(quick[0], finished=9.0, failure=Failure("timeout", ""))
    found = Offered.of(sessions, [hung, *quick[1:]], asked_rate=1.0)
    assert found is not None and found.num_unfinished == 2


def test_longer_outputs_alone_are_no_backlog() -> None:
    sessions, records = each_second(*[1.0] * 12, *[5.0] * 4)
    longer = [replace(one, num_output_tokens=5) for one in records[12:]]
    for last, was_sustained in ((records[12:], False), (longer, True)):
        found = Offered.of(sessions, [*records[:12], *last], asked_rate=1.0)
        assert found is not None and found.was_sustained == was_sustained


def test_later_requests_may_take_longer() -> None:
    """Because they are longer, for example: the server keeps up as long as it ends as many as arrive."""
    found = Offered.of(*each_second(*[1.0] * 16, *[6.0] * 16), asked_rate=1.0)
    assert found is not None and found.was_sustained
