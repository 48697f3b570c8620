"""What the tables say of a run and of a sweep, and which load a sweep names."""

import itertools
from dataclasses import replace
from typing import Any

from kvrelay.bench.base import CANCELLED, Failure
from kvrelay.bench.knee import find_knee
from kvrelay.bench.report import render, render_sweep
from kvrelay.bench.result import RunResult
from kvrelay.bench.slo import Slos
from kvrelay.bench.summary import summarise
from tests.bench.records import record, run_of


def ten(label: str, ttft: float, *, sent: float = 0.0, due: float = 0.0, **more: Any) -> RunResult:
    records = [record(sent + ttft, sent + ttft + 1, due=due, sent=sent, index=index) for index in range(10)]
    return run_of(*records, label=label, slos=Slos.parse(["ttft=1000"]), **more)


def test_the_knee_is_the_most_that_still_meets_the_slos() -> None:
    found = find_knee([ten("1/s", 0.9), ten("2/s", 0.5), ten("4/s", 1.5)], 0.9)
    assert found is not None and found.label == "2/s"
    assert find_knee([ten("4/s", 1.5)], 0.9) is None
    longer = run_of(record(1.0, 1.5, 2.0, 2.5), label="longer", slos=Slos.parse(["ttft=1000"]))
    assert longer.summary.requests_per_second < 1 < longer.summary.output_tokens_per_second
    shorter = run_of(record(1.0), label="shorter", slos=Slos.parse(["ttft=1000"]))
    assert find_knee([longer, shorter], 0.9) is longer, "the most output tokens, not requests"


def test_a_load_whose_figures_are_not_valid_is_no_knee() -> None:
    slow = ten("1/s", 0.9)
    late, cut = ten("2/s", 0.5, sent=0.2), ten("4/s", 0.4, was_cut=True)
    stalled, given_up = ten("8/s", 0.4, longest_stall=0.25), ten("9/s", 0.4, num_unsent=2)
    assert find_knee([slow, late, cut, stalled, given_up], 0.9) is slow
    waiting = ten("8 at a time", 0.5, sent=0.2, due=0.2, max_concurrency=8)
    assert find_knee([slow, waiting], 0.9) is waiting, "at the limit requests wait for their place on purpose"
    assert find_knee([slow, ten("8 at a time", 0.5, sent=0.2, max_concurrency=8)], 0.9) is slow, "nothing to wait for"


def test_a_sweeps_table_shows_goodput_and_says_what_is_wrong_with_a_load() -> None:
    slos = Slos.parse(["ttft=1000"])
    loads = [
        ten("1/s", 0.9, longest_stall=0.25, client_cpu_share=0.97),
        ten("2/s", 0.5, sent=0.2),
        ten("4/s", 1.5, was_cut=True),
    ]
    head, *rows = render_sweep(loads, loads[0], slos, 0.9).splitlines()
    assert head.split()[:6] == ["load", "offered", "req/s", "goodput", "meet", "SLOs"]
    assert [row.split()[:5] for row in rows[:3]] == [
        ["1/s", "-", "5.26", "5.26", "100.0%"],
        ["2/s", "-", "6.67", "6.67", "100.0%"],
        ["4/s", "-", "4.00", "0.00", "0.0%"],
    ]
    assert [row.rpartition("  ")[2] for row in rows[:3]] == ["client stalled for 250 ms", "client late", "cut off"]
    cost = "this client took 0 us of processor time per output token"
    busy, idle = (f"{cost}, {share} of a core" for share in ("97%", "0%"))
    assert rows[4:10] == [
        "1/s: for up to 250 ms this client did not notice what arrived",
        f"1/s: {busy}",
        "2/s: a request was sent 200 ms late: this client could not keep up",
        f"2/s: {idle}",
        f"4/s: {idle}",
        "4/s: interrupted: these are the results so far",
    ]
    assert rows[11] == (
        "the highest load at which 90% of the requests meet ttft <= 1000 ms: 1/s; loads with a flaw were left out"
    )


def test_the_table_says_how_long_requests_waited_for_a_place() -> None:
    waited, at_once = record(3.0, scheduled=1.0, due=2.5, sent=2.5), record(3.0, due=2.5, sent=2.5)
    note = "with --concurrency a request waited 1500 ms for its place: no latency includes this wait"
    assert note in render(run_of(waited), None)
    assert "--concurrency" not in render(run_of(at_once), None)
    assert "--concurrency" not in render(run_of(record(3.0, scheduled=1.0, sent=2.5)), None), "the client was late"


def test_the_table_says_how_many_requests_ran_at_a_time() -> None:
    found = run_of(record(2.0), record(1.0, sent=0.5), record(1.5, sent=1.0, failure=Failure("timeout", "")))
    assert ", 1.5 requests at a time" in render(found, None)


def test_the_table_says_how_many_ended_within_the_duration() -> None:
    records = record(1.0), record(3.0), record(4.0, sent=1.0)
    summary = summarise(records, window=2.0)
    assert (summary.mean_running, summary.num_within) == (2.0, 1)
    table = render(replace(run_of(*records), summary=summary), None)
    assert "3 requests completed (1 within --duration), 0 failed, in 2.0 s;" in table and "  0.50 requests/s" in table


def test_the_table_says_which_requests_the_server_did_not_count() -> None:
    cut = replace(record(1.0, failure=Failure(CANCELLED, "")), counted_by="chunks")
    counted = "output tokens counted by usage and chunks: "
    assert counted + "requests that failed or were cut off have no usage" in render(run_of(record(1.0), cut), None)
    uncounted = replace(record(1.0), counted_by="chunks")
    table = render(run_of(record(1.0), cut, uncounted), None)
    assert counted + "the server does not always send usage" in table


def test_chunks_may_be_several_tokens_and_say_less_about_an_early_end() -> None:
    short = record(1.0, wanted=4)
    assert "1 requests ended before the output length" in render(run_of(short), None)
    uncounted = replace(short, counted_by="chunks")
    assert "1 requests had fewer chunks than tokens asked for" in render(run_of(uncounted), None)
    failed = replace(uncounted, failure=Failure("timeout", ""))
    assert "1 requests ended before the output length" in render(run_of(short, failed), None), "this one was counted"


def test_the_table_says_that_a_piece_is_several_tokens() -> None:
    several = replace(record(1.0, 2.0), num_output_tokens=8)
    note = "a piece held 3.0 output tokens on average: ITL is the time between pieces"
    assert note in render(run_of(several, record(1.0), record(failure=Failure("timeout", ""))), None)
    assert "a piece held" not in render(run_of(record(1.0, 2.0)), None)
    empty = replace(record(1.0, 2.0), num_output_tokens=1)
    assert "a piece held 0.50 output tokens on average: some had none" in render(run_of(empty), None)


def test_the_table_says_that_answers_came_in_one_piece() -> None:
    """They meet what is asked of the time between tokens, as in vLLM's benchmark."""
    slos = Slos.parse(["itl=1", "tpot=1"])
    whole = replace(record(5.0), num_output_tokens=8)
    table = render(run_of(whole, record(5.0), replace(whole, failure=Failure("timeout", "")), slos=slos), slos)
    assert "66.7% of requests meet itl <= 1 ms, tpot <= 1 ms" in table
    assert (
        "\n1 answers of several tokens came in one piece: without ITL and TPOT, they meet any --slo of these" in table
    )
    assert "in one piece" not in render(run_of(record(5.0), record(1.0, 2.0)), None)


def test_the_table_says_that_pieces_came_together() -> None:
    buffered = record(*itertools.repeat(1.0, 16))
    note = "100% of the pieces after the first came in one read with the one before"
    assert note in render(run_of(buffered, record(1.0)), None)
    odd = record(0.5, 0.5, *map(float, range(1, 21)))
    assert "in one read" not in render(run_of(odd), None), "so few change nothing"


def test_the_table_says_when_prompts_are_not_as_long_as_asked_for() -> None:
    longer = replace(record(1.0), num_prompt_tokens=7)
    note = "the server counted 1.20 times the prompt tokens that were asked for"
    assert note in render(run_of(longer, record(2.0)), None)
    assert "times the prompt tokens" not in render(run_of(record(1.0)), None)


def test_the_table_says_when_requests_are_fewer_than_may_run_at_a_time() -> None:
    turns = (record(1.0), record(2.0), record(3.0), record(4.0))
    few = run_of(*turns, max_concurrency=3, num_at_once=2)
    assert "2 requests or conversations: there were never 3 at a time" in render(few, None)
    assert few.flaws == ("too few",)
    enough, arriving = run_of(*turns, max_concurrency=2, num_at_once=2), run_of(*turns, max_concurrency=9)
    assert "never" not in render(enough, None) + render(arriving, None) and not enough.flaws + arriving.flaws


def test_the_table_and_the_verdict_of_a_sweep_do_not_contradict_each_other() -> None:
    slos = Slos.parse(["ttft=1000"])
    load = run_of(*(record(0.5 if number < 224 else 2.0) for number in range(250)), label="1/s", slos=slos)
    table = render_sweep([load], None, slos, 0.9)
    assert " 89.6% " in table and "no load meets ttft <= 1000 ms for 90% of its requests" in table
    assert "at which 99.9% of the requests" in render_sweep([load], load, slos, 0.999)
