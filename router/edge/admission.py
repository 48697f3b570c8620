"""The room that requests have from their admission until they run, from when on the relay counts them.

Invariant: an admission gives back what it has reserved: for each request when that begins, and for those that never do
when it is closed. So the limit of requests holds, and no request that was admitted finds no room.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from kvrelay.core.errors import CancelledByPeerError


class Admissions:
    """The requests of all calls that do not run yet: some are still being tokenised."""

    def __init__(self) -> None:
        self._waiting: dict[str, Admission] = {}  # by request id

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self) -> "Admission":
        """Returns the admission of a call, as a context that closes it."""
        return Admission(self._waiting)

    def has(self, request_id: str) -> bool:
        return request_id in self._waiting

    def abort(self, request_id: str) -> None:
        """Marks a request as aborted; unknown ids are ignored."""
        if request_id in self._waiting:
            self._waiting[request_id].aborted.add(request_id)

    def end(self, request_id: str) -> None:
        """Gives back the room of a request, which runs from now on. Raises CancelledByPeerError if it was aborted."""
        admission = self._waiting.pop(request_id, None)
        if admission is not None:
            admission.check_aborted(request_id)


class Admission:
    """The room for the requests of one call."""

    def __init__(self, waiting: dict[str, "Admission"]) -> None:
        self.aborted: set[str] = set()
        self._waiting = waiting
        self._request_ids: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def reserve(self, request_ids: Iterable[str]) -> None:
        """Reserves room for these requests, of whose ids none waits already. Called once."""
        self._request_ids = tuple(request_ids)
        self._waiting.update(dict.fromkeys(self._request_ids, self))

    def check_aborted(self, request_id: str) -> None:
        if request_id in self.aborted:
            raise CancelledByPeerError(f"request {request_id} was aborted")

    def close(self) -> None:
        """Gives back the room of the requests that have not begun. Idempotent."""
        for request_id in self._request_ids:
            if self._waiting.get(request_id) is self:  # not another call's, which has the id now
                del self._waiting[request_id]
