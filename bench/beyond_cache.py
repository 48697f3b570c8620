"""How much has to be read until nothing of it is still in the processor's caches."""

from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_LEAST_BYTES = 256 << 20


def beyond_cache_bytes(caches: Path = _CACHES) -> int:
    """Returns twice the size of the last-level cache, as the kernel tells it (a virtual machine may see that of a whole
    host), and 256 MiB at least."""
    sizes = [int(file.read_text().strip().removesuffix("K")) for file in caches.glob("index*/size")]
    return max(_LEAST_BYTES, 2 * 1024 * max(sizes, default=0))
