"""Model weights that several nodes of a machine share: written by the first one, mapped by the others.

Writer and readers take memory in the same order, so that a reader finds each weight where it was written. Invariant:
shared weights are used only if they are what this node would have loaded itself: model, formats and the checkpoint's
files are part of the note.
"""

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from paged_kernels.extension import load_extension
from paged_kernels.weight_memory import WeightMemory
from torch import Tensor

from kvrelay.core.weight_store import WeightStore
from kvrelay.engine.layers.weight_format import WeightFormat
from kvrelay.engine.loading.checkpoint import Checkpoint
from kvrelay.engine.models.model_config import ModelConfig

_logger = logging.getLogger(__name__)


class SharedMemory(WeightMemory):
    """Of a store. Where it is filled, what is written goes to a copy that is this process's alone."""

    def __init__(self, store: WeightStore, *, is_filled: bool) -> None:
        super().__init__()
        self.is_filled = is_filled
        self._descriptor = store.descriptor
        self._end = store.WEIGHTS_OFFSET

    def _chunk(self, num_bytes: int) -> Tensor:
        begin, self._end = self._end, self._end + num_bytes
        if not self.is_filled:
            os.ftruncate(self._descriptor, self._end)
        flags = mmap.MAP_PRIVATE if self.is_filled else mmap.MAP_SHARED
        return torch.frombuffer(mmap.mmap(self._descriptor, num_bytes, flags, offset=begin), dtype=torch.uint8)


@dataclass(slots=True)
class WeightPlace:
    """`digests` are of the checkpoint's files: None if the memory is still to be filled; whoever fills it sets them."""

    memory: WeightMemory
    digests: Sequence[bytes] | None = None


@contextmanager
def place_for(
    store: WeightStore | None, config: ModelConfig, weights: WeightFormat, checkpoint: Checkpoint
) -> Iterator[WeightPlace]:
    """Where a model's weights lie: in the store, filled, or to be filled until the end of the block; in memory of our
    own where there is no store, other weights are in it, or the format is none that is shared."""
    if store is None or weights.device.type != "cpu" or weights.prequantized is not None:
        yield WeightPlace(weights.memory)
        return
    wanted = _content(config, weights, checkpoint)
    with store.turn(lambda: _logger.info("waiting for the weights that another node loads")):
        note = store.note()
        if not note:
            store.clear()
            place = WeightPlace(SharedMemory(store, is_filled=False))
            yield place
            assert place.digests is not None
            digests = [digest.hex() for digest in place.digests]
            store.complete(json.dumps({"content": wanted, "digests": digests}).encode())
            return
        found = json.loads(note)
        if found["content"] != wanted:
            _logger.warning("the weights that the other nodes share are not those of this model now: loading our own")
            yield WeightPlace(weights.memory)
            return
        _logger.info("the weights are those that another node has loaded")
        yield WeightPlace(SharedMemory(store, is_filled=True), [bytes.fromhex(digest) for digest in found["digests"]])


def _content(config: ModelConfig, weights: WeightFormat, checkpoint: Checkpoint) -> str:
    """Equal only where the same weights would be written in the same order. Kernels decide about the order, too."""
    native = load_extension()
    files = [(str(file.path), (stat := file.path.stat()).st_size, stat.st_mtime_ns) for file in checkpoint.files]
    kernels = "" if native is None else native.available_instruction_sets()[0]
    content = [repr(asdict(config)), str(weights.dtype), weights.bits, files, kernels]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
