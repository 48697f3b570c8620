"""What an engine is made from. Invariant: the value of every option is one that its type allows."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.option_types import (
    AttentionBackendName,
    BlockSize,
    Count,
    DeviceName,
    DTypeName,
    FileDescriptor,
    KVCacheDType,
    MemoryShare,
    NodesPerDevice,
    Quantization,
    SchedulingPolicy,
    Threads,
)

_SMALLEST_STEP = 16


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The settings of a node that concern its engine; `NodeSettings` describes each under the same name. 0 leaves the
    choice to kvrelay. Raises ConfigurationError for a value that the type of an option does not allow."""

    model: str
    dtype: DTypeName = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    calculate_kv_scales: bool = False
    quantization: Quantization = "none"
    threads: Threads = 0
    weight_store: FileDescriptor | None = None
    attention_backend: AttentionBackendName = "auto"
    device: DeviceName = "auto"
    nodes_per_device: NodesPerDevice = 1
    enforce_eager: bool = False
    block_size: BlockSize = 16
    num_blocks: Count = 0
    gpu_memory_utilization: MemoryShare = 0.0
    max_model_len: Count = 0
    max_num_seqs: Count = 0
    max_num_batched_tokens: Count = 0
    max_num_mixed_tokens: Count = 0
    scheduling_policy: SchedulingPolicy = "fcfs"

    def __post_init__(self) -> None:
        for name, allowed in _allowed_values().items():
            value = getattr(self, name)
            try:
                allowed.validate_python(value, strict=True)
            except ValidationError as error:
                raise ConfigurationError(f"{name}: {error.errors()[0]['msg']}, got {value!r}") from None

    def sized_for(self, device: torch.device) -> Self:
        """Returns these options with the limits of a step chosen where they were left to kvrelay: few tokens keep a
        CPU busy, a GPU needs many. `max_num_mixed_tokens` stays 0 on a CPU, where the scheduler decides by what steps
        have cost. Raises ConfigurationError for a step too small to be of use, or to compute a token of every
        sequence."""
        if 0 < self.max_num_batched_tokens < _SMALLEST_STEP:
            raise ConfigurationError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than {_SMALLEST_STEP}; raise it, or "
                "leave it out"
            )
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than --max-num-seqs "
                f"{self.max_num_seqs}, and a step could not compute a token of every sequence; raise it, or lower "
                "--max-num-seqs"
            )
        on_cpu = device.type == "cpu"
        max_num_batched_tokens = self.max_num_batched_tokens or max(512 if on_cpu else 2048, self.max_num_seqs)
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or min(64 if on_cpu else 256, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_mixed_tokens=self.max_num_mixed_tokens or (0 if on_cpu else max_num_batched_tokens),
        )


@cache
def _allowed_values() -> dict[str, TypeAdapter[Any]]:
    """Returns what checks the values of each option, by its name."""
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(EngineOptions, include_extras=True).items()}
