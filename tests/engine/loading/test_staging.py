"""Weights on their way to a GPU: chunks are used in turn, and none before the copy out of it has ended."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrelay.engine.loading.staging import Staging


@dataclass(slots=True)
class Gpu:
    """A stand-in that makes chunks, and ends that record whether they were waited for."""

    chunks: list[Tensor] = field(default_factory=list)

    def make_chunk(self, num_bytes: int) -> Tensor:
        self.chunks.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.chunks[-1]

    def make_end(self) -> "End":
        return End(self)


@dataclass(slots=True)
class End:
    gpu: Gpu
    recorded: int = 0
    waited: int = 0

    def record(self) -> None:
        assert self.recorded == self.waited, "two copies out of one chunk"
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited = self.recorded


def test_no_chunk_is_written_to_before_its_copy_has_ended() -> None:
    gpu = Gpu()
    staging = Staging(16, gpu.make_chunk, gpu.make_end)
    target = torch.zeros(10, 8, dtype=torch.float32)
    for row in target:
        chunk = staging.chunk()
        values = torch.arange(8, dtype=torch.bfloat16)
        chunk.copy_(values.view(torch.uint8))
        staging.send(chunk.view(torch.bfloat16), row)
    assert len(gpu.chunks) == 4
    assert torch.equal(target, torch.arange(8.0).expand(10, 8))
