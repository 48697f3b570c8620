"""Lines on standard error, which never wait for long: whoever writes them also serves, hears Ctrl-C and starts nodes
again, and goes on if the reader of its standard error is stuck.

Limit: where several processes write to one pipe, another may fill it between a look at it and the write.
"""

import select
import sys
import time

_PATIENCE_MS = 100  # for which a reader may be busy
_REST_SECONDS = 2.0  # between two such waits, so that a slow reader takes little of a server's time
_PIECE_CHARS = 1000  # a pipe that can be written to takes 4,096 bytes


class StandardError:
    """Writes lines for as long as somebody takes them. If nobody reads any more, the reader has stopped, or the disk is
    full, they are lost; the next line that is taken comes after one that says how many. Not for two threads at once."""

    def __init__(self) -> None:
        self._is_stuck = False
        self._rests_until = 0.0
        self._num_lost = 0
        self._is_cut = False  # the last line lacks its end

    def write(self, line: str) -> None:
        """Writes a line, which comes without its end."""
        try:
            if self._num_lost:
                self._write_pieces(f"(lines missing here: {self._num_lost}; nobody read them, or there was no room)\n")
                self._num_lost = 0
            self._write_pieces(f"{line}\n")
        except OSError:
            self._num_lost += 1

    def write_from(self, name: str, line: str) -> None:
        """Writes a line under the name of whom it is from."""
        self.write(f"[{name}] {line}")

    def _write_pieces(self, text: str) -> None:
        """Writes a text piece by piece. Raises OSError when one is not taken."""
        if sys.stderr is None:  # it was closed before this process began
            return
        if self._is_cut:
            text = f"\n{text}"
        for begin in range(0, len(text), _PIECE_CHARS):
            if not self._is_taken():
                raise BlockingIOError
            self._is_cut = True
            sys.stderr.write(text[begin : begin + _PIECE_CHARS])
            sys.stderr.flush()
        self._is_cut = False

    def _is_taken(self) -> bool:
        """Tells whether writing does not wait. Waits a moment for that, but neither soon again nor before
        there was room."""
        try:
            descriptor = sys.stderr.fileno()
        except OSError:  # it is no file
            return True
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        is_taken = bool(room.poll(0))
        if not is_taken and not self._is_stuck and time.monotonic() >= self._rests_until:
            is_taken = bool(room.poll(_PATIENCE_MS))
            self._rests_until = time.monotonic() + _REST_SECONDS
        self._is_stuck = not is_taken
        return is_taken
