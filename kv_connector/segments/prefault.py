"""Maps a pool's pages ahead of their first use: a transfer into untouched pages would wait for each of them.

Invariant: the space was reserved before, so this takes no memory that is not the pool's; nothing waits for it.
"""

import ctypes
import mmap
import sys
import threading

from kv_connector.pool import Rows

_MADV_POPULATE_WRITE = 23  # Linux 5.14; keeps what pages hold
_SLICE_BYTES = 16 << 20  # a few milliseconds


class Prefault:
    """A thread that maps the pages of `rows`, which are contiguous and stay mapped until `stop` has returned."""

    def __init__(self, rows: Rows) -> None:
        begin = rows.ctypes.data
        aligned = begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._span = range(aligned, begin + rows.nbytes, _SLICE_BYTES)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-prefault", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current slice. Idempotent."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform != "linux":
            return
        madvise = ctypes.CDLL(None).madvise  # that of the mmap module holds the interpreter's lock
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start in self._span:
            length = min(_SLICE_BYTES, self._span.stop - start)
            if self._stopped.is_set() or madvise(start, length, _MADV_POPULATE_WRITE) != 0:
                return  # stopped, or an older kernel, which maps pages when they are used
