"""The load that was offered where requests arrive at times of their own, and whether the server kept up with it.

A server that does not keep up lets requests wait, each longer than the ones before, as long as others arrive. Its
figures are then those of the length of the run: with twice as many requests, the last ones would wait twice as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvrelay.bench.base import RequestRecord
from kvrelay.bench.workloads import Session

_LEAST_IN_A_QUARTER = 4  # of fewer requests, their lengths and a burst say more than the server
_GREW = 2.0  # a server that takes more requests at a time as they come slows down a little, too
_GREW_PER_SECOND = 0.25  # answers then end at less than 1 / 1.25 = 80% of the rate at which requests arrive


@dataclass(frozen=True, slots=True)
class Offered:
    """What arrived. The first turn of a conversation arrives, its later ones wait for answers and do not count.

    `rate` is the number of arrivals per second, as it was drawn or as it is in the trace: their gaps over the time from
    the first to the last. `asked_rate` is the one that was asked for, None for a trace. `num_unfinished` are those that
    had not ended when the last one arrived. `was_sustained` is False if the server fell behind: the last quarter of the
    requests took more than twice as long as the first one, each from its time to its last piece, per output token as
    well, and longer by more than a quarter of the time between them. Fewer than 16 that ended well do not show it.
    """

    rate: float
    asked_rate: float | None
    num_arrived: int
    num_unfinished: int
    was_sustained: bool

    @property
    def was_too_short(self) -> bool:
        """Tells that most had not ended when the last one arrived: nothing then shows whether the server keeps up."""
        return self.was_sustained and 2 * self.num_unfinished > self.num_arrived

    @classmethod
    def of(
        cls, sessions: Sequence[Session], records: Sequence[RequestRecord], *, asked_rate: float | None
    ) -> "Offered | None":
        """Returns what these sessions offered and what became of it, or None if all could begin at once. Those that
        were to arrive after the last request ended were cut off, and do not count."""
        ended = max((record.finished for record in records), default=0.0)
        times = [session.at for session in sessions if session.at <= ended]
        last = max(times, default=0.0)
        if last <= 0:
            return None
        arrived = sorted(
            (record for record in records if not record.is_later_turn), key=lambda record: record.scheduled
        )
        good = [record for record in arrived if record.failure is None]
        return cls(
            rate=(len(times) - 1) / last,
            asked_rate=asked_rate,
            num_arrived=len(arrived),
            num_unfinished=sum(record.finished > last for record in arrived),
            was_sustained=not _fell_behind(good),
        )


def _fell_behind(arrived: Sequence[RequestRecord]) -> bool:
    quarter = len(arrived) // 4
    if quarter < _LEAST_IN_A_QUARTER:
        return False
    first, last = arrived[:quarter], arrived[-quarter:]
    took_first, took_last = (fmean(one.arrivals[-1] - one.scheduled for one in part) for part in (first, last))
    passed = fmean(one.scheduled for one in last) - fmean(one.scheduled for one in first)
    tokens_first, tokens_last = (fmean(one.num_output_tokens for one in part) for part in (first, last))
    return (
        took_last > _GREW * took_first
        and took_last * tokens_first > _GREW * took_first * tokens_last  # longer outputs alone are no backlog
        and took_last - took_first > _GREW_PER_SECOND * passed
    )
