"""Model weights that several nodes of a machine share: the first node writes them, the others map them.

Writer and readers allocate in the same order, so that a reader finds each weight where it was written. Invariant: a
node uses shared weights only if they are those it would have loaded itself. The store's note therefore describes the
model, its formats and the checkpoint's files.
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
from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.weight_memory import WeightMemory
from torch import Tensor

from kvrelay.core.process.weight_store import WeightStore
from kvrelay.engine.layers.weight_format import WeightFormat
from kvrelay.engine.loading.checkpoint import Checkpoint
from kvrelay.engine.models.model_config import ModelConfig

_logger = logging.getLogger(__name__)


class SharedWeightMemory(WeightMemory):
    """Memory for weights in a `WeightStore`. If the store is filled already, writes go to a private copy of the pages
    and never reach the store."""

    def __init__(self, store: WeightStore, *, is_filled: bool) -> None:
        super().__init__()
        self.is_filled = is_filled
        self._descriptor = store.descriptor
        self._end = store.WEIGHTS_OFFSET
        self._native = load_extension()

    def take(self, num_bytes: int) -> Tensor:
        taken = super().take(num_bytes)
        if self._native is not None and not self.is_filled:
            self._native.take_huge_pages(taken)  # which others map as they are
        return taken

    def _chunk(self, num_bytes: int) -> Tensor:
        begin, self._end = self._end, self._end + num_bytes
        if not self.is_filled:
            os.ftruncate(self._descriptor, self._end)
        if self._native is not None:
            return self._native.map_file(self._descriptor, begin, num_bytes, shared=not self.is_filled)
        flags = mmap.MAP_PRIVATE if self.is_filled else mmap.MAP_SHARED
        return torch.frombuffer(mmap.mmap(self._descriptor, num_bytes, flags, offset=begin), dtype=torch.uint8)


@dataclass(slots=True)
class WeightPlace:
    """The memory for a model's weights. `digests` are those of the checkpoint's files, None until the memory is filled;
    whoever fills it sets them."""

    memory: WeightMemory
    digests: Sequence[bytes] | None = None


@contextmanager
def place_for(
    store: WeightStore | None, config: ModelConfig, weights: WeightFormat, checkpoint: Checkpoint
) -> Iterator[WeightPlace]:
    """Yields the memory for a model's weights. In the store it is filled already, or must be filled within the context.
    It is private memory without a store, if the store has other weights, or if the format cannot be shared."""
    if store is None or weights.device.type != "cpu" or weights.prequantized is not None:
        yield WeightPlace(weights.memory)
        return
    wanted = _content(config, weights, checkpoint)
    with store.turn(lambda: _logger.info("waiting for the weights that another node loads")):
        note = store.note()
        if not note:
            store.clear()
            place = WeightPlace(SharedWeightMemory(store, is_filled=False))
            yield place
            assert place.digests is not None
            digests_in_hex = [digest.hex() for digest in place.digests]
            store.complete(json.dumps({"content": wanted, "digests": digests_in_hex}).encode())
            return
        found = json.loads(note)
        if found["content"] != wanted:
            _logger.warning("the weights that the other nodes share are not those of this model now: loading our own")
            yield WeightPlace(weights.memory)
            return
        _logger.info("the weights are those that another node has loaded")
        digests = [bytes.fromhex(digest) for digest in found["digests"]]
        yield WeightPlace(SharedWeightMemory(store, is_filled=True), digests)


def _content(config: ModelConfig, weights: WeightFormat, checkpoint: Checkpoint) -> str:
    """Returns a digest that is the same only if the same weights would be written in the same order. The order also
    depends on the kernels."""
    native = load_extension()
    files = [(str(file.path), (stat := file.path.stat()).st_size, stat.st_mtime_ns) for file in checkpoint.files]
    kernels = "" if native is None else native.available_instruction_sets()[0]
    content = [repr(asdict(config)), str(weights.dtype), weights.bits, files, kernels]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
