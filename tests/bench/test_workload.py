"""The benchmark's arithmetic, and its client against a small streaming server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.workload import FIRST_WORD_ID, RequestTimes, percentile, random_prompts, run_workload, summarise


class StreamingHandler(BaseHTTPRequestHandler):
    """Answers with as many pieces as tokens were asked for."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["model"] != "m":
            self.send_error(404)
            return
        num_tokens = request["max_tokens"]
        piece = '{"choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":null}]}'
        last = '{"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}]}'
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}}, separators=(",", ":"))
        self.send_response(200)
        self.end_headers()
        for event in (*[piece] * num_tokens, last, usage, "[DONE]"):
            self.wfile.write(f"data: {event}\n\n".encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StreamingHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_run_workload(address: str) -> None:
    prompts = random_prompts(4, 3, 9, vocab_size=1000, seed=1)
    summary = run_workload(address, "m", prompts, 8)
    assert (summary.num_requests, summary.num_output_tokens) == (4, 32)
    assert 0 < summary.ttft_p50 <= summary.ttft_p99 <= summary.seconds
    assert summary.tokens_per_second == pytest.approx(32 / summary.seconds)


def test_a_refused_request_ends_the_benchmark(address: str) -> None:
    with pytest.raises(RuntimeError, match="HTTP 404"):
        run_workload(address, "another", [[300]], 8)


def test_summary() -> None:
    times = [RequestTimes(1.0, (2.0, 2.5, 3.0), 5, 3), RequestTimes(1.0, (4.0, 4.1, 5.0), 5, 3)]
    summary = summarise(times)
    assert (summary.seconds, summary.num_output_tokens, summary.tokens_per_second) == (4.0, 6, 1.5)
    assert (summary.ttft_p50, summary.ttft_p99) == (1.0, 3.0)
    assert summary.itl_p50 == pytest.approx(0.5)
    assert summary.itl_p99 == pytest.approx(0.9)


@pytest.mark.parametrize(("percent", "expected"), [(50, 2), (99, 4), (100, 4), (1, 1)])
def test_percentile(percent: float, expected: float) -> None:
    assert percentile([4, 2, 1, 3], percent) == expected


def test_prompts_are_those_of_their_seed_and_hold_no_special_tokens() -> None:
    prompts = random_prompts(50, 2, 4, vocab_size=400, seed=3)
    assert prompts == random_prompts(50, 2, 4, vocab_size=400, seed=3)
    assert {len(prompt) for prompt in prompts} == {2, 3, 4}
    assert all(FIRST_WORD_ID <= token < 400 for prompt in prompts for token in prompt)
