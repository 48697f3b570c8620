"""Arrivals, prompts and traces: functions of their seed, with the shares and lengths that were asked for."""

import itertools
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from bench.random_model import BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID, write_byte_tokenizer
from kvrelay.bench.arrivals import gamma_arrivals, periodic_arrivals
from kvrelay.bench.base import Answer, Segment
from kvrelay.bench.plan import plan_warmup, plans_of
from kvrelay.bench.prompts import PromptBuilder, Vocabulary
from kvrelay.bench.settings import ServeBenchSettings, SweepBenchSettings
from kvrelay.bench.trace import read_trace
from kvrelay.bench.workloads import Lengths, MixedLoad, random_requests, shared_prefix_requests
from kvrelay.core.errors import ConfigurationError


def take(rate: float, count: int, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    return list(itertools.islice(gamma_arrivals(rate, burstiness=burstiness, seed=seed), count))


def gaps(arrivals: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


def test_arrivals_are_those_of_their_seed() -> None:
    assert take(2.0, 50, seed=7) == take(2.0, 50, seed=7)
    assert take(2.0, 50, seed=7) != take(2.0, 50, seed=8)
    assert take(2.0, 50)[0] == 0.0
    assert take(math.inf, 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    found = gaps(take(5.0, 20_000, burstiness=burstiness))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 5.0, rel=0.05)
    assert statistics.stdev(found) / mean == pytest.approx(burstiness**-0.5, rel=0.05)


def test_periodic_arrivals_end_before_the_end() -> None:
    assert list(periodic_arrivals(2.0, 6.0)) == [0.0, 2.0, 4.0]


def test_equal_names_give_equal_tokens() -> None:
    builder = PromptBuilder(Vocabulary.of_size(4096), "token_ids", seed=1)
    long, short = builder.token_ids([Segment("a", 20)]), builder.token_ids([Segment("a", 8)])
    assert (len(long), long[:8]) == (20, short)
    assert builder.token_ids([Segment("b", 20)]) != long
    assert PromptBuilder(Vocabulary.of_size(4096), "token_ids", seed=2).token_ids([Segment("a", 20)]) != long
    longer = builder.token_ids([Segment("c", 5000)])
    assert min(longer) >= 300, "ids that may be special are not drawn"
    assert longer == random.Random("1/c").choices(range(300, 4096), k=5000), "pieces continue one another"


def test_a_tokenizers_special_tokens_are_not_drawn(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, vocab_size=300)
    vocabulary = Vocabulary.of_tokenizer(str(tmp_path))
    tokens = set(PromptBuilder(vocabulary, "text", seed=1).token_ids([Segment("a", 5000)]))
    assert not tokens & {BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID}
    assert max(tokens) == 299


def test_prompts_of_text_need_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--tokenizer"):
        PromptBuilder(Vocabulary.of_size(4096), "text", seed=1)
    with pytest.raises(ConfigurationError, match="no tokenizer at"):
        Vocabulary.of_tokenizer(str(tmp_path))


def test_requests_take_the_prefixes_in_turn() -> None:
    requests = shared_prefix_requests(6, 2, 100, Lengths(3, 5), Lengths(4, 4), seed=1)
    builder = PromptBuilder(Vocabulary.of_size(4096), "token_ids", seed=1)
    prompts = [builder.token_ids(request.segments) for request in requests]
    assert {tuple(prompt[:100]) for prompt in prompts[::2]} == {tuple(prompts[0][:100])}
    assert prompts[0][:100] != prompts[1][:100]
    assert len({tuple(prompt[100:]) for prompt in prompts}) == 6
    assert [request.kind for request in requests] == ["first", "first", "later", "later", "later", "later"]


def test_random_requests_have_their_lengths() -> None:
    requests = random_requests(200, Lengths(3, 5), Lengths(1, 2), seed=4)
    assert {request.segments[0].length for request in requests} == {3, 4, 5}
    assert {request.max_tokens for request in requests} == {1, 2}
    assert requests == random_requests(200, Lengths(3, 5), Lengths(1, 2), seed=4)


@pytest.mark.parametrize("text", ["", "0", "5-3", "x", "3-", "-3"])
def test_what_is_no_range_of_lengths_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"tokens|range"):
        Lengths.parse(text)


async def test_a_conversation_holds_what_was_asked_and_answered() -> None:
    builder = PromptBuilder(Vocabulary.of_size(4096), "token_ids", seed=1)
    conversation = builder.conversation("0")
    first = await conversation.ask([Segment("a", 4)])
    conversation.hear(Answer(token_ids=(7, 8)))
    second = await conversation.ask([Segment("b", 3)])
    assert second[:6] == (*first, 7, 8)
    conversation.hear(Answer(num_output_tokens=5, text="no ids came"))
    assert len(await conversation.ask([Segment("c", 1)])) == 9 + 5 + 1


async def test_a_chat_has_a_message_per_turn(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, vocab_size=300)
    builder = PromptBuilder(Vocabulary.of_tokenizer(str(tmp_path)), "chat", seed=1)
    conversation = builder.conversation("0")
    message = ("user", "".join(builder.text_pieces([Segment("a", 4)])))
    assert await conversation.ask([Segment("a", 4)]) == (message,)
    conversation.hear(Answer(text="fine"))
    assert (await conversation.ask([Segment("b", 4)]))[:2] == (message, ("assistant", "fine"))


def test_long_prompts_arrive_among_steady_streams() -> None:
    mixed = MixedLoad(2, Lengths(4, 4), Lengths(8, 8), 2.0, 6.0, Lengths(50, 60), Lengths(3, 3))
    steady, long = mixed.sessions(seed=1)[:2], mixed.sessions(seed=1)[2:]
    assert {session.until for session in (*steady, *long)} == {6.0}
    streams = [[request.segments for request in itertools.islice(session.requests, 50)] for session in steady]
    assert len({segments for stream in streams for segments in stream}) == 100, "no prompt comes twice"
    assert [session.at for session in long] == [0.0, 2.0, 4.0]
    assert all(50 <= request.segments[0].length <= 60 for session in long for request in session.requests)


@pytest.mark.parametrize("loads", [{"concurrencies": (1, 2)}, {"concurrencies": (2, 2)}, {"request_rates": (0.5, 0.5)}])
def test_runs_of_a_sweep_share_no_prompt(loads: dict[str, Any]) -> None:
    settings = SweepBenchSettings(**loads, requests=3)
    prompts = [
        {request.segments for session in plan.sessions for request in session.requests} for plan in plans_of(settings)
    ]
    assert not prompts[0] & prompts[1]


def write_trace(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def entry(timestamp: float, length: float, *hash_ids: int) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": length, "output_length": 5, "hash_ids": hash_ids}


def test_a_trace_gives_times_lengths_and_equal_tokens_for_equal_hash_ids(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", entry(1000, 1000, 4, 9), entry(3000, 1536, 4, 9, 2), entry(4000, 10, 1))
    sessions = read_trace(path, speedup=2.0, limit=2)
    assert [session.at for session in sessions] == [0.0, 1.0]
    builder = PromptBuilder(Vocabulary.of_size(4096), "token_ids", seed=1)
    first, second = (builder.token_ids(request.segments) for session in sessions for request in session.requests)
    assert (len(first), len(second)) == (1000, 1536)
    assert second[:1000] == first, "equal hash ids are equal tokens"


def test_the_warm_up_of_a_trace_is_as_long_as_its_first_request(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", entry(0, 1000, 4, 9), entry(1, 10, 1))
    settings = ServeBenchSettings(workload="trace", trace=path, warmup=2)
    [measured] = plans_of(settings)
    warmup = [request for session in plan_warmup(settings, measured).sessions for request in session.requests]
    assert [([part.length for part in one.segments], one.max_tokens) for one in warmup] == [([1000], 5)] * 2
    names = {part.name for session in measured.sessions for one in session.requests for part in one.segments}
    assert not names & {part.name for one in warmup for part in one.segments}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("not json", "t.jsonl:2 is not a JSON object"),
        ({"timestamp": 1, "input_length": 3, "output_length": 1}, "KeyError: 'hash_ids'"),
        (entry(5, 1000, 1), "1000 prompt tokens need 2 hash ids, there are 1"),
        (entry(5, 0), "lengths are at least 1"),
        (entry(0, 3, 1), "before the first"),
        (entry(float("nan"), 3, 1), "2 is not an object with .*timestamp is nan"),
        (entry(5, float("inf"), 1), "2 is not an object with .*OverflowError"),
    ],
)
def test_the_error_names_the_wrong_line_of_a_trace(tmp_path: Path, bad: object, message: str) -> None:
    path = write_trace(tmp_path / "t.jsonl", entry(1, 3, 1), bad)
    with pytest.raises(ConfigurationError, match=message):
        read_trace(path)


def test_a_trace_can_be_replayed_with_a_limited_concurrency(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", entry(0, 10, 1))
    [plan] = plans_of(ServeBenchSettings(workload="trace", trace=path, concurrency=3))
    assert plan.max_concurrency == 3


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        plans_of(ServeBenchSettings(workload="trace", trace=tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match="holds no requests"):
        plans_of(ServeBenchSettings(workload="trace", trace=write_trace(tmp_path / "empty")))
