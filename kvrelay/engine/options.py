"""What an engine is made from. Invariant: the value of every option is one that its type allows, and no two contradict
each other."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError

from kvrelay.core.config.option_types import (
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
from kvrelay.core.errors import ConfigurationError

_SMALLEST_STEP = 16


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The settings of a node that concern its engine; `NodeSettings` describes each under the same name. 0 leaves the
    choice to kvrelay. Raises ConfigurationError for a value that the type of an option does not allow, and for options
    of which no engine could be made.

    Messages have the names of options, here and wherever the engine is made: they are keywords of `LLM` and lines of a
    node's file, and its flags and variables are made of them."""

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
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        """Raises ConfigurationError for a step too small to be of use, or to compute a token of every sequence, and for
        what only the weights, which take long to load, would otherwise bring to light."""
        most_tokens, held = self.max_num_batched_tokens, self.num_blocks * self.block_size
        if 0 < most_tokens < _SMALLEST_STEP:
            raise ConfigurationError(
                f"max_num_batched_tokens {most_tokens} is less than {_SMALLEST_STEP}; raise it, or leave it out"
            )
        if 0 < most_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens {most_tokens} is less than max_num_seqs {self.max_num_seqs}, and a step could "
                "not compute a token of every sequence; raise it, or lower max_num_seqs"
            )
        if self.max_model_len == 1:
            raise ConfigurationError("max_model_len 1 leaves no token for an answer; raise it, or leave it out")
        if 0 < held < self.max_model_len:
            raise ConfigurationError(
                f"max_model_len {self.max_model_len} is more than {self.num_blocks} blocks of {self.block_size} tokens "
                f"hold; lower it to {held}, or raise num_blocks"
            )
        if self.calculate_kv_scales and self.kv_cache_dtype == "auto":
            raise ConfigurationError("calculate_kv_scales is for an FP8 KV cache: set kv_cache_dtype to fp8")

    def sized_for(self, device: torch.device) -> Self:
        """Returns these options with the limits of a step chosen where they were left to kvrelay: few tokens keep a
        CPU busy, a GPU needs many. `max_num_mixed_tokens` stays 0 on a CPU, where the scheduler decides by what steps
        have cost."""
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
