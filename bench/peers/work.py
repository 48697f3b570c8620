"""How many tokens each engine has read and made, so that only equal work is compared.

An engine that ends requests early, or gets other prompts, would look fast. Counts are compared per request and kind of
request: in a workload that lasts for a fixed time, engines answer different numbers of requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.peers.base import PeerError
from kvrelay.bench.base import RequestRecord

# A server may put a begin token before a prompt of text: one in 64, the shortest prompt of all workloads. A server
# that cannot be told to ignore end tokens ends a random text early now and then.
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Work:
    """What one engine did in one workload of one round, for requests of one kind. Tokens are the sums over all requests
    that ended well. `short` requests ended with fewer output tokens than asked for; `may_end_early` allows that."""

    engine: str
    round: int
    workload: str
    kind: str
    requests: int
    short: int
    prompt_tokens: int
    output_tokens: int
    may_end_early: bool = False

    @property
    def subject(self) -> tuple[int, str, str]:
        """Returns what is equal for two engines that have to be compared."""
        return self.round, self.workload, self.kind

    def __str__(self) -> str:
        return (
            f"{self.engine}: {self.prompt_tokens / self.requests:.1f} prompt and "
            f"{self.output_tokens / self.requests:.1f} output tokens a request"
        )


def work_of(
    engine: str, number: int, workload: str, records: Sequence[RequestRecord], *, may_end_early: bool
) -> list[Work]:
    """Returns one entry for each kind of request that has ended well."""
    good = [record for record in records if record.failure is None]
    return [
        _work(engine, number, workload, kind, [one for one in good if one.kind == kind], may_end_early=may_end_early)
        for kind in dict.fromkeys(record.kind for record in good)
    ]


def _work(
    engine: str, number: int, workload: str, kind: str, records: Sequence[RequestRecord], *, may_end_early: bool
) -> Work:
    return Work(
        engine,
        number,
        workload,
        kind,
        requests=len(records),
        short=sum(record.num_output_tokens < record.num_wanted_tokens for record in records),
        prompt_tokens=sum(record.num_prompt_tokens for record in records),
        output_tokens=sum(record.num_output_tokens for record in records),
        may_end_early=may_end_early,
    )


def check_work(one: Work, others: Iterable[Work]) -> None:
    """Raises PeerError when requests ended early that must not, or when `one` differs by more than TOLERANCE from
    another engine's entry in `others` for the same requests."""
    if one.short and not one.may_end_early:
        raise PeerError(
            f"{one.engine}, {one.workload}: {one.short} of {one.requests} requests ended with fewer output tokens than "
            "asked for, so that its figures are of less work"
        )
    for other in others:
        if other.subject == one.subject and not (
            _is_close(one.prompt_tokens / one.requests, other.prompt_tokens / other.requests)
            and _is_close(one.output_tokens / one.requests, other.output_tokens / other.requests)
        ):
            raise PeerError(f"{one.workload}: the engines did different work ({other}; {one})")


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(one, other)
