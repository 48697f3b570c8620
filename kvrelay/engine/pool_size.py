"""How many blocks a pool gets, and how long a sequence may be.

Invariant: a pool has room for at least one sequence of the greatest length allowed.
"""

import logging
from dataclasses import dataclass

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine.options import EngineOptions

_logger = logging.getLogger(__name__)
_DEFAULT_POOL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The number of blocks of a pool, and the most tokens of a sequence."""

    num_blocks: int
    max_model_len: int


def size_pool(options: EngineOptions, layout: KVLayout, *, max_model_len: int, free_bytes: int) -> PoolSize:
    """Returns the size of a pool in host memory, of which `free_bytes` are free. Unless the options ask for more, each
    of the nodes that share this memory takes at most an equal share, and leaves one for everything else: nodes that
    start together all see the same free memory. `max_model_len` and errors are those of `fit_length`."""
    if options.num_blocks:
        num_blocks = options.num_blocks
    elif options.gpu_memory_utilization:
        num_blocks = int(free_bytes * options.gpu_memory_utilization) // layout.block_bytes
    else:
        pool_bytes = max(_DEFAULT_POOL_BYTES, layout.num_blocks_for(max_model_len) * layout.block_bytes)
        num_blocks = min(pool_bytes, free_bytes // (options.nodes_per_device + 1)) // layout.block_bytes
    return fit_length(options, layout, num_blocks, max_model_len=max_model_len)


def fit_length(options: EngineOptions, layout: KVLayout, num_blocks: int, *, max_model_len: int) -> PoolSize:
    """Returns the size of a pool of `num_blocks`, with the longest sequence that fits into it, of `max_model_len`
    tokens at most: what the options say, or else the model's own limit.

    Raises ConfigurationError if no sequence fits, or an explicit `max_model_len` does not. The model's own is lowered
    to what fits.
    """
    fits = num_blocks * layout.block_size
    if min(fits, max_model_len) < 2:
        raise ConfigurationError(
            f"a pool of {num_blocks} blocks holds no sequence; raise num_blocks or gpu_memory_utilization"
        )
    if fits < max_model_len and options.max_model_len:
        raise ConfigurationError(
            f"a sequence of {max_model_len} tokens needs {layout.num_blocks_for(max_model_len)} blocks, the pool has "
            f"{num_blocks}; lower max_model_len to {fits}, or raise num_blocks or gpu_memory_utilization"
        )
    if fits < max_model_len:
        _logger.warning("max_model_len is %d instead of the model's %d: the pool holds no more", fits, max_model_len)
    return PoolSize(num_blocks, min(max_model_len, fits))
