"""Workloads as sessions that arrive and send one request after the other.

Invariant: a workload is a pure function of its settings and a seed. Nothing here knows a server.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvrelay.bench.arrivals import periodic_arrivals
from kvrelay.bench.base import RequestSpec, Segment

STEADY, LONG = "steady", "long"


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one user, one after the other, from `at` seconds on.

    In a conversation each prompt holds all earlier ones and their answers. No request begins after `until` seconds.
    `think_time` is the number of seconds between an answer and the next request.
    """

    at: float
    requests: Iterable[RequestSpec]
    is_conversation: bool = False
    until: float | None = None
    think_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of numbers of tokens, both ends included, from which lengths are drawn evenly."""

    shortest: int
    longest: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parses `512` or `128-512`. Raises ValueError."""
        first, dash, last = text.strip().partition("-")
        try:
            lengths = cls(int(first), int(last if dash else first))
        except ValueError:
            raise ValueError(f"{text!r} is not a number of tokens; write 512, or 128-512 for a range") from None
        if not 1 <= lengths.shortest <= lengths.longest:
            raise ValueError(f"{text!r} is not a range of at least one token; write 512, or 128-512")
        return lengths

    def draw(self, source: random.Random) -> int:
        return source.randint(self.shortest, self.longest)


def random_requests(count: int, inputs: Lengths, outputs: Lengths, *, seed: int) -> list[RequestSpec]:
    """Returns requests whose prompts share nothing."""
    draw = random.Random(f"random/{seed}")
    return [RequestSpec((Segment(f"random/{index}", inputs.draw(draw)),), outputs.draw(draw)) for index in range(count)]


def shared_prefix_requests(
    count: int, num_prefixes: int, prefix: int, inputs: Lengths, outputs: Lengths, *, seed: int
) -> list[RequestSpec]:
    """Returns requests whose prompts begin with one of `num_prefixes` prefixes of `prefix` tokens, in turn, and go on
    with tokens of their own. The first request of a prefix is of the kind "first", all others of the kind "later"."""
    draw = random.Random(f"shared-prefix/{seed}")
    return [
        RequestSpec(
            (Segment(f"prefix/{index % num_prefixes}", prefix), Segment(f"own/{index}", inputs.draw(draw))),
            outputs.draw(draw),
            kind="first" if index < num_prefixes else "later",
        )
        for index in range(count)
    ]


def conversation_turns(index: int, turns: int, inputs: Lengths, outputs: Lengths, *, seed: int) -> list[RequestSpec]:
    """Returns the turns of conversation `index`, of the kinds "turn 1", "turn 2" and so on."""
    draw = random.Random(f"multi-turn/{seed}/{index}")
    return [
        RequestSpec((Segment(f"turn/{index}/{turn}", inputs.draw(draw)),), outputs.draw(draw), kind=f"turn {turn + 1}")
        for turn in range(turns)
    ]


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """Sessions that ask again as soon as they are answered, `streams` of them, beside a long prompt every `period`
    seconds. No request begins after `duration` seconds."""

    streams: int
    inputs: Lengths
    outputs: Lengths
    period: float
    duration: float
    long_inputs: Lengths
    long_outputs: Lengths

    def sessions(self, *, seed: int) -> list[Session]:
        steady = [Session(0.0, self._steady(stream, seed), until=self.duration) for stream in range(self.streams)]
        draw = random.Random(f"long/{seed}")
        long = [
            Session(at, [self._long(index, draw)], until=self.duration)
            for index, at in enumerate(periodic_arrivals(self.period, self.duration))
        ]
        return [*steady, *long]

    def _steady(self, stream: int, seed: int) -> Iterator[RequestSpec]:
        draw = random.Random(f"steady/{seed}/{stream}")
        for index in itertools.count():
            prompt = (Segment(f"steady/{stream}/{index}", self.inputs.draw(draw)),)
            yield RequestSpec(prompt, self.outputs.draw(draw), kind=STEADY)

    def _long(self, index: int, draw: random.Random) -> RequestSpec:
        prompt = (Segment(f"long/{index}", self.long_inputs.draw(draw)),)
        return RequestSpec(prompt, self.long_outputs.draw(draw), kind=LONG)


def arriving(requests: Iterable[RequestSpec], arrivals: Iterable[float]) -> list[Session]:
    """Returns a session for each request."""
    return [Session(at, [request]) for request, at in zip(requests, arrivals, strict=False)]
