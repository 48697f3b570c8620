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


def size_pool(options: EngineOptions, layout: KVLayout, *, model_limit: int, free_bytes: int) -> PoolSize:
    """Returns the size of a pool in host memory, of which `free_bytes` are free. Unless the options ask for more, each
    of the nodes that share this memory takes at most an equal share, and leaves one for everything else: nodes that
    start together all see the same free memory. Raises ConfigurationError as `fit_length` does."""
    wanted = options.max_model_len or model_limit
    num_blocks = options.num_blocks
    if not num_blocks and options.gpu_memory_utilization:
        num_blocks = int(free_bytes * options.gpu_memory_utilization) // layout.block_bytes
    if not num_blocks:
        pool_bytes = max(_DEFAULT_POOL_BYTES, layout.num_blocks_for(wanted) * layout.block_bytes)
        num_blocks = min(pool_bytes, free_bytes // (options.nodes_per_device + 1)) // layout.block_bytes
    return fit_length(options, layout, num_blocks, model_limit=model_limit)


def fit_length(options: EngineOptions, layout: KVLayout, num_blocks: int, *, model_limit: int) -> PoolSize:
    """Returns the size of a pool of `num_blocks`, with the longest sequence that fits into it and the model allows.

    Raises ConfigurationError if an explicit `max_model_len` does not fit. The model's own limit, `model_limit` tokens,
    is lowered to what fits.
    """
    wanted = options.max_model_len or model_limit
    if options.max_model_len > model_limit:
        raise ConfigurationError(
            f"max_model_len {options.max_model_len} is more than the model can do; lower it to {model_limit}"
        )
    fits = num_blocks * layout.block_size
    if fits < wanted and options.max_model_len:
        raise ConfigurationError(
            f"a sequence of {wanted} tokens needs {layout.num_blocks_for(wanted)} blocks, the pool has {num_blocks}; "
            f"lower max_model_len to {fits}, or raise num_blocks or gpu_memory_utilization"
        )
    if fits < wanted:
        _logger.warning("max_model_len is %d instead of the model's %d: the pool holds no more", fits, wanted)
    max_model_len = min(wanted, fits)
    if max_model_len < 2:
        raise ConfigurationError(f"a pool of {num_blocks} blocks holds no sequence; raise num_blocks")
    return PoolSize(num_blocks, max_model_len)
