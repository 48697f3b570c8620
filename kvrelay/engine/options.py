"""What an engine is made from."""

from dataclasses import dataclass
from typing import Literal

from kvrelay.engine.device import DeviceName
from kvrelay.engine.kv_cache_dtype import KVCacheDType
from kvrelay.engine.layers.weight_format import Quantization
from kvrelay.engine.models.loader import DTypeName


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What `NodeSettings` describes, field by field under the same names; 0 leaves the choice to us."""

    model: str
    dtype: DTypeName = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    calculate_kv_scales: bool = False
    quantization: Quantization = "none"
    threads: int = 0
    attention_backend: Literal["auto", "native", "reference"] = "auto"
    device: DeviceName = "auto"
    nodes_per_device: int = 1
    enforce_eager: bool = False
    block_size: int = 16
    num_blocks: int = 0
    gpu_memory_utilization: float = 0.0
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
