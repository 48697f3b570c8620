"""The compiled attention backend for CPUs. Imports the extension, which must have been built.

It picks the best instruction set of the processor at run time and computes on `num_threads()` threads. A token's result
is the same to the last bit in any batch and on any number of threads. When at least four query heads share a KV head,
it is also the same however its sequence was divided among steps; otherwise very few tokens by themselves, such as
decodes and the ends of some chunks, are summed in another order.
"""

import torch
from torch import Tensor

from paged_kernels import _native
from paged_kernels.base import AttentionMetadata
from paged_kernels.cpu.threads import num_threads
from paged_kernels.fused import rotary
from paged_kernels.kv_scales import KVScales, scales_of_pool


class NativeBackend:
    """`AttentionBackend` in C++. All tensors live on the CPU; query, key and value share one dtype, and the pool has it
    too, or is float8_e4m3fn with `kv_scales`.

    Raises ValueError for tensors that do not fit together and IndexError for a block or slot outside the pool, before
    anything is written.
    """

    name = "native"

    def __init__(self, kv_scales: KVScales | None = None) -> None:
        self.kv_scales = kv_scales

    def write_kv(self, key: Tensor, value: Tensor, kv_pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
        key_scale, value_scale = scales_of_pool(kv_pool, layer, self.kv_scales)
        pool = kv_pool if key_scale is None else kv_pool.view(torch.uint8)
        _native.write_kv(key, value, pool, layer, slot_mapping, key_scale, value_scale, num_threads())

    def write_kv_rotary(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_pool: Tensor,
        layer: int,
        slot_mapping: Tensor,
    ) -> None:
        rotary(query, key, *angles)
        self.write_kv(key, value, kv_pool, layer, slot_mapping)

    def attend(
        self,
        query: Tensor,
        kv_pool: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        key_scale, value_scale = scales_of_pool(kv_pool, layer, self.kv_scales)
        _native.paged_attention(
            output,
            query,
            kv_pool if key_scale is None else kv_pool.view(torch.uint8),
            layer,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale,
            sliding_window or 0,
            key_scale,
            value_scale,
            num_threads(),
        )
        return output
