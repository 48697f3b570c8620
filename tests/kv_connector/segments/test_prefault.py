"""Pages of a mapping are there before anybody has touched them, with what they held."""

import mmap
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kv_connector.segments.prefault import Prefault

_SIZE = 40 << 20


def resident_bytes(path: str) -> int:
    """Returns how many bytes of this process's mapping of `path` are in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    [start] = [number for number, line in enumerate(lines) if path in line]
    [resident] = [line for line in lines[start : start + 8] if line.startswith("Rss:")]
    return int(resident.split()[1]) * 1024


@pytest.mark.parametrize("stops", [False, True])
def test_pages_are_mapped_and_keep_what_they_hold(*, stops: bool) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="prefault-") as file:
        file.truncate(_SIZE)
        mapping = mmap.mmap(file.fileno(), _SIZE)
        rows = np.frombuffer(mapping, np.uint8).reshape(40, -1)
        rows[3, 5] = 7
        prefault = Prefault(rows[1:])
        if stops:
            prefault.stop()
        prefault._thread.join()
        mapped = resident_bytes(file.name)
        assert rows[3, 5] == 7 and rows.sum() == 7
        del rows
        mapping.close()
    assert mapped <= _SIZE if stops else mapped == _SIZE - (1 << 20)
