"""A fixed set of requests against an OpenAI-compatible server, all streams timed at the client.

Prompts are random token ids, so nothing is found by name. Invariant: all times are from this process's monotonic clock.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

TIMEOUT_SECONDS = 600.0
# Ids below are the byte-level tokenizer's bytes and special tokens; a prompt should hold none of the special ones.
FIRST_WORD_ID = 259


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Monotonic seconds. `arrivals`: when each piece of text came; a piece is a token, but text that waits for the rest
    of a character comes with the next one."""

    sent: float
    arrivals: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a whole workload: seconds, and output tokens per second from the first request sent to the last token."""

    num_requests: int
    num_output_tokens: int
    seconds: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:7.1f} output tokens/s   TTFT p50 {self.ttft_p50 * 1e3:6.0f} ms, p99 "
            f"{self.ttft_p99 * 1e3:6.0f} ms   ITL p50 {self.itl_p50 * 1e3:6.1f} ms, p99 {self.itl_p99 * 1e3:6.1f} ms"
        )


def random_prompts(count: int, shortest: int, longest: int, *, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids of `count` prompts, their lengths drawn evenly from `shortest` to `longest`."""
    draw = random.Random(seed)
    return [draw.choices(range(FIRST_WORD_ID, vocab_size), k=draw.randint(shortest, longest)) for _ in range(count)]


def run_workload(address: str, model: str, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> Summary:
    """All prompts at the same time, greedily, each for exactly `num_output_tokens`. `address` is host:port."""
    together = threading.Barrier(len(prompts))

    def run_one(prompt: Sequence[int]) -> RequestTimes:
        together.wait(TIMEOUT_SECONDS)
        return _stream(address, model, prompt, num_output_tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return summarise(list(pool.map(run_one, prompts)))


def summarise(times: Sequence[RequestTimes]) -> Summary:
    ttfts = [one.ttft for one in times]
    itls = [itl for one in times for itl in one.itls] or [0.0]
    return Summary(
        num_requests=len(times),
        num_output_tokens=sum(one.num_output_tokens for one in times),
        seconds=max(one.arrivals[-1] for one in times) - min(one.sent for one in times),
        ttft_p50=percentile(ttfts, 50),
        ttft_p99=percentile(ttfts, 99),
        itl_p50=percentile(itls, 50),
        itl_p99=percentile(itls, 99),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * int(percent) // 100) - 1)]


def _stream(address: str, model: str, prompt: Sequence[int], num_output_tokens: int) -> RequestTimes:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)
    arrivals: list[float] = []
    num_tokens = 0
    try:
        sent = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for event in _server_sent_events(connection.getresponse()):
            if b'"choices":[]' not in event and b'"finish_reason":null' in event:
                arrivals.append(time.monotonic())
            elif b'"usage":{' in event:
                num_tokens = json.loads(event)["usage"]["completion_tokens"]
    finally:
        connection.close()
    if num_tokens != num_output_tokens or not arrivals:
        raise RuntimeError(f"asked for {num_output_tokens} tokens and got {num_tokens}")
    return RequestTimes(sent, tuple(arrivals), len(prompt), num_tokens)


def _server_sent_events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each event, unparsed: a load generator on the same machine should cost little."""
    if response.status != http.HTTPStatus.OK:
        raise RuntimeError(f"HTTP {response.status}: {response.read().decode()}")
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield line[6:]
