"""What the whole answers that clients have not taken yet may have in memory together. Their requests have ended, so
nothing else limits how many there are.

Invariant: they have at most the limit, or what the newest of them has.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UntakenAnswers:
    """The answers that clients are taking, from the oldest to the newest."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._answers: dict[object, tuple[int, Callable[[], object]]] = {}

    @contextmanager
    def holding(self, num_bytes: int, drop: Callable[[], object]) -> Iterator[None]:
        """Counts an answer while the context is open. If there is too much with it, those that wait longest make room:
        they count no longer, and their `drop` is called, which has to end their contexts soon."""
        key = object()
        self._answers[key] = num_bytes, drop
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and len(self._answers) > 1:
            oldest = next(iter(self._answers))
            _, drop_oldest = self._answers[oldest]
            self._end(oldest)
            drop_oldest()
        try:
            yield
        finally:
            self._end(key)

    def _end(self, key: object) -> None:
        if key in self._answers:
            self.num_bytes -= self._answers.pop(key)[0]
