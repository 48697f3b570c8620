"""The settings of a node in one of its lives. Operators may choose each of them for every node by itself, and change
them when they start it again.

Invariant: they are such as a node would start with (`kvrelay/engine/options.py`, `kvrelay/engine/pool_size.py`).
"""

from dataclasses import dataclass, replace
from random import Random

from kvrelay.core.config.option_types import SchedulingPolicy

BLOCK_SIZE = 4
_LARGEST_MODEL_LEN = 128
_NO_LIMIT = 64  # the most tokens of any step, so that steps which also decode are as long as others


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The settings of the same names, and which kind of device computes: with `run_ahead` one whose steps run while the
    next one is planned, with `samples_later` one that has the KV of a step before its samples. `max_model_len` 0 is as
    much as the pool holds."""

    num_blocks: int = 64
    max_model_len: int = 0
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 16
    max_num_mixed_tokens: int = _NO_LIMIT
    policy: SchedulingPolicy = "fcfs"
    stream_interval: float = 0.01
    fetch_timeout: float = 3.0
    run_ahead: bool = False
    samples_later: bool = False

    @property
    def longest(self) -> int:
        """Returns the most tokens of a sequence."""
        fits = min(_LARGEST_MODEL_LEN, self.num_blocks * BLOCK_SIZE)
        return min(self.max_model_len, fits) if self.max_model_len else fits


def draw_node_config(random: Random, usual: NodeConfig, *, serves_all: bool) -> NodeConfig:
    """Draws the settings of a node that is not like the others. With `serves_all` it takes whatever a node with the
    `usual` settings takes."""
    drawn = replace(
        usual,
        num_blocks=random.choice((12, 20, 32, 64)),
        max_num_seqs=random.choice((1, 3, 3, 16)),
        max_num_batched_tokens=random.choice((16, 64)),
        max_num_mixed_tokens=random.choice((_NO_LIMIT, 0, 4, 16)),
        policy=random.choice(("fcfs", "priority")),
        stream_interval=random.choice((0.0, 0.05)),
        fetch_timeout=random.choice((0.2, 3.0)),
        samples_later=random.random() < 0.5,
    )
    if serves_all:
        return replace(
            drawn,
            num_blocks=max(drawn.num_blocks, usual.num_blocks),
            max_model_len=usual.longest,
            max_num_seqs=max(drawn.max_num_seqs, usual.max_num_seqs),
        )
    return replace(drawn, max_model_len=random.choice((0, drawn.longest // 2)))
