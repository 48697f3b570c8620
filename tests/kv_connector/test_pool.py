"""Memory that a connector makes for a pool."""

import re
import sys
from pathlib import Path

from kv_connector.pool import LocalPool
from kvrelay.core.kv.layout import KVLayout

_LAYOUT = KVLayout(num_kv_heads=2, num_layers=16, block_size=16, head_dim=64, dtype="bfloat16")  # 128 KiB a block
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def flags_of_mapping(address: int) -> set[str]:
    """Returns the kernel's flags of the mapping that contains `address`; "" where it has none."""
    if sys.platform != "linux":
        return set()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


def test_a_pool_of_its_own_is_zeroed_and_asks_for_huge_pages() -> None:
    pool = LocalPool.anonymous(_LAYOUT, 32)
    try:
        assert not pool.rows.any()
        assert ("hg" in flags_of_mapping(pool.rows.ctypes.data)) == _HUGE_PAGES.exists()
    finally:
        pool.release()
