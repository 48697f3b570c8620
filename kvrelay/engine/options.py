"""What an engine is made from."""

from dataclasses import dataclass, replace
from typing import Literal, Self

import torch

from kvrelay.core.errors import ConfigurationError
from kvrelay.engine.device import DeviceName
from kvrelay.engine.kv_cache_dtype import KVCacheDType
from kvrelay.engine.layers.weight_format import Quantization
from kvrelay.engine.models.loader import DTypeName

_SMALLEST_STEP = 16


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What `NodeSettings` describes, field by field under the same names; 0 leaves the choice to us."""

    model: str
    dtype: DTypeName = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    calculate_kv_scales: bool = False
    quantization: Quantization = "none"
    threads: int = 0
    weight_store: int | None = None
    attention_backend: Literal["auto", "native", "reference"] = "auto"
    device: DeviceName = "auto"
    nodes_per_device: int = 1
    enforce_eager: bool = False
    block_size: int = 16
    num_blocks: int = 0
    gpu_memory_utilization: float = 0.0
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_num_mixed_tokens: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"

    def sized_for(self, device: torch.device) -> Self:
        """With the bounds of a step chosen where they were left to us: a CPU is busy with few tokens, a card needs
        many to be. Raises ConfigurationError for a step too small to be of use."""
        if 0 < self.max_num_batched_tokens < _SMALLEST_STEP:
            raise ConfigurationError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than {_SMALLEST_STEP}; raise it, or "
                "leave it out"
            )
        on_cpu = device.type == "cpu"
        max_num_batched_tokens = self.max_num_batched_tokens or (512 if on_cpu else 2048)
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or (64 if on_cpu else 256),
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_mixed_tokens=self.max_num_mixed_tokens or (128 if on_cpu else max_num_batched_tokens),
        )
