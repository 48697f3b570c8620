"""The files that the process has open, to see that nothing is left."""

import gc
from collections import Counter
from contextlib import suppress
from pathlib import Path


def open_files() -> Counter[str]:
    """Returns how often each is open, by its path; what has none is named by its kind and perhaps a number."""
    gc.collect()  # earlier tests may have left some in cycles
    found: Counter[str] = Counter()
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):  # that of the list itself
            found[str(descriptor.readlink())] += 1
    return found
