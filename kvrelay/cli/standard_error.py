"""Lines on standard error, which never wait for long: the supervisor of processes goes on if its reader is stuck."""

import contextlib
import select
import sys

_PATIENCE_MS = 100  # for which a reader may be busy, once
_PIECE_CHARS = 1000  # a pipe that can be written to takes 4,096 bytes


class StandardError:
    """Writes lines for as long as somebody takes them. If nobody reads any more, the reader has stopped, or the disk is
    full, they are lost: who writes is also who hears Ctrl-C and starts nodes again."""

    def __init__(self) -> None:
        self._is_stuck = False

    def write(self, name: str, line: str) -> None:
        """Writes a line under the name of whom it is from."""
        text = f"[{name}] {line}\n"
        with contextlib.suppress(OSError):
            for begin in range(0, len(text), _PIECE_CHARS):
                if not self._is_taken():
                    return
                sys.stderr.write(text[begin : begin + _PIECE_CHARS])
                sys.stderr.flush()

    def _is_taken(self) -> bool:
        """Tells whether writing does not wait. Waits a moment for that, but not again before there was room."""
        try:
            descriptor = sys.stderr.fileno()
        except OSError:  # it is no file
            return True
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        self._is_stuck = not room.poll(0 if self._is_stuck else _PATIENCE_MS)
        return not self._is_stuck
