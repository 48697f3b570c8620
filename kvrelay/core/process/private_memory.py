"""Host memory for a pool that no other process sees."""

import mmap

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.layout import KVLayout


def map_private_memory(layout: KVLayout, num_blocks: int) -> mmap.mmap:
    """Maps zeroed memory for `num_blocks` blocks. By default mmap shares it with forked processes, which would write
    their KV into blocks that have names here. Raises ConfigurationError when the system refuses it."""
    size = num_blocks * layout.block_bytes
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise ConfigurationError(
            f"there is no memory for {num_blocks} KV blocks ({size / 2**30:.1f} GiB): {error}; lower num_blocks or "
            "gpu_memory_utilization"
        ) from error
