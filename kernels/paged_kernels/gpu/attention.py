"""The attention backend for CUDA and ROCm GPUs: plans launches of the Triton kernels; nothing waits for the device.

Rounding depends on how a sequence's KV is split, and so, in the last bits, on the batch and the GPU.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kernels.base import AttentionMetadata
from paged_kernels.gpu.device.decode import decode_attention_kernel, merge_splits_kernel
from paged_kernels.gpu.device.prefill import prefill_attention_kernel
from paged_kernels.gpu.launch import (
    GpuTraits,
    KernelCall,
    ceil_divide,
    launch,
    next_power_of_two,
    traits_of,
    widen_products,
)
from paged_kernels.gpu.write_kv import plan_write_kv
from paged_kernels.kv_scales import FP8, KVScales, scales_of_pool

_LOG2_E = math.log2(math.e)
_MIN_ROWS = 16  # the smallest matrix product that Triton has
_MAX_SPLITS = 64
_MIN_SPLIT_TOKENS = 128
_PROGRAMS_PER_SM = 4  # of four warps; of eight, half as many
_NEARLY_FULL = 0.7
_NEARLY_AS_GOOD = 0.9
_TILE = 64  # tokens of KV, where they fit
_FEW_TOKENS = 16  # new tokens of a sequence whose step is split like one of decodes: a prompt's end after a fetch


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of `AttentionBackend.attend`, checked, and where the result goes."""

    output: Tensor  # [num_tokens, num_heads, head_dim], contiguous
    query: Tensor
    kv_pool: Tensor
    layer: int
    metadata: AttentionMetadata
    scale: float
    sliding_window: int | None
    kv_scales: KVScales | None

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.kv_pool.shape[1]

    @property
    def longest(self) -> int:
        """Returns an upper bound of the number of tokens that one query sees."""
        return min(self.metadata.max_seq_len, self.sliding_window or self.metadata.max_seq_len)


class TritonBackend:
    """`AttentionBackend` for tensors on the current CUDA device (or on the CPU in Triton's interpreter).

    Queries are float32, bfloat16 or float16. The pool has their dtype, or is float8_e4m3fn; then `kv_scales` gives the
    value of a stored 1 for each layer and KV head. Negative slots are padding and not written; a sequence of length 0
    attends to nothing and gets zeros, so that a batch can be padded to a captured size.
    """

    name = "triton"

    def __init__(self, kv_scales: KVScales | None = None) -> None:
        self._kv_scales = kv_scales

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
        """Does all in one pass: `query` is rotated in place, the rotated `key` only reaches the pool. `angles`: cos and
        sin, float32, `[num_tokens, head_dim / 2]` or full width with equal halves."""
        launch([plan_write_kv(query, key, value, angles, kv_pool, layer, slot_mapping, self._kv_scales)])

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
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        call = AttentionCall(output, query, kv_pool, layer, metadata, scale, sliding_window, self._kv_scales)
        launch(plan_attention(call, traits_of(query.device)))
        return output


def plan_attention(call: AttentionCall, traits: GpuTraits) -> list[KernelCall]:
    """Plans a step. Decodes, and few new tokens that would leave the GPU half idle in the prefill kernel, are split
    over the KV they see; other prompts take the prefill kernel. A mixture takes both: the first for its decodes."""
    if call.query.shape[1] % call.kv_pool.shape[1] or call.query.stride(-1) != 1:
        raise ValueError("query heads must be a multiple of KV heads, with a contiguous last axis")
    if call.kv_pool.dtype not in (FP8, call.query.dtype):
        raise ValueError(f"the pool is {call.kv_pool.dtype} and the query {call.query.dtype}")
    if _is_short(call, traits):
        return _plan_split(call, traits, call.metadata.max_query_len)
    if len(call.metadata.seq_lens) == 1:
        return [_plan_prefill(call, traits, skip_decodes=False)]
    return [*_plan_split(call, traits, 1), _plan_prefill(call, traits, skip_decodes=True)]


def _is_short(call: AttentionCall, traits: GpuTraits) -> bool:
    longest_query = call.metadata.max_query_len
    if longest_query <= _FEW_TOKENS:
        return True
    tiles = ceil_divide(longest_query, _prompt_rows(call) // call.group)
    num_programs = len(call.metadata.seq_lens) * tiles * call.kv_pool.shape[1]
    return 2 * num_programs <= traits.num_sms and num_splits(num_programs, call.longest, _num_places(traits, 8)) > 1


@functools.lru_cache(maxsize=64)  # the layers of a step ask the same
def num_splits(num_programs: int, longest: int, num_places: int) -> int:
    """Returns how many programs share one sequence and KV head, none with too little to do, where `num_places` run at
    once. One, if one each nearly fills the GPU: more would mean another wave of programs, and partial results to merge.
    Otherwise the fewest that are nearly as good as any, by the tiles that the places take in all waves."""
    if num_programs >= _NEARLY_FULL * num_places:
        return 1
    most = max(1, min(ceil_divide(longest, _MIN_SPLIT_TOKENS), _MAX_SPLITS))
    num_tiles = ceil_divide(longest, _TILE)
    choices = range(1, most + 1)
    costs = [ceil_divide(num_programs * splits, num_places) * ceil_divide(num_tiles, splits) for splits in choices]
    return next(splits for splits, cost in zip(choices, costs, strict=True) if cost <= min(costs) / _NEARLY_AS_GOOD)


def _num_places(traits: GpuTraits, num_warps: int) -> int:
    """Returns how many programs of the decode kernel run at once, by the registers that heads of 128 take."""
    return _PROGRAMS_PER_SM * traits.num_sms * 4 // num_warps


def _plan_split(call: AttentionCall, traits: GpuTraits, longest_query: int) -> list[KernelCall]:
    """Plans the sequences that have at most `longest_query` new tokens."""
    num_seqs, num_kv_heads = len(call.metadata.seq_lens), call.kv_pool.shape[1]
    num_heads, head_dim = call.query.shape[1:]
    if longest_query == 1:
        rows, tokens, num_warps = max(_MIN_ROWS, next_power_of_two(call.group)), 1, 4
    else:
        rows = max(_MIN_ROWS if _is_exact(call) else 64, next_power_of_two(call.group))
        tokens, num_warps = rows // call.group, 8  # fewer warps would overflow registers before sm_90
    num_tiles = ceil_divide(longest_query, tokens)
    num_programs = max(1, num_seqs * num_tiles * num_kv_heads)
    splits = num_splits(num_programs, call.longest, _num_places(traits, num_warps))
    partial_output = partial_weight = None
    if splits > 1:
        shape = (num_seqs * num_tiles * tokens, num_heads, splits)
        partial_output = torch.empty((*shape, head_dim), dtype=torch.float32, device=call.query.device)
        partial_weight = torch.empty(shape, dtype=torch.float32, device=call.query.device)
    tile, num_stages = _tile(call, traits)
    partials = {"output": call.output, "partial_output": partial_output, "partial_weight": partial_weight}
    decode = KernelCall(
        decode_attention_kernel,
        (num_seqs * num_tiles, num_kv_heads, splits),
        {**partials, "num_tiles": num_tiles, **_inputs(call), **_strides(call)},
        {"TOKENS": tokens, "TILE": tile, "SPLIT": splits > 1} | _shared_constants(call, rows, traits),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if splits == 1:
        return [decode]
    merge = KernelCall(
        merge_splits_kernel,
        (num_seqs * num_tiles * tokens, num_heads),
        {
            **partials,
            "query_start_loc": call.metadata.query_start_loc,
            "num_tokens": num_tiles * tokens,
            "num_splits": splits,
        },
        {
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": next_power_of_two(head_dim),
            "SPLITS": next_power_of_two(splits),
        },
    )
    return [decode, merge]


def _plan_prefill(call: AttentionCall, traits: GpuTraits, *, skip_decodes: bool) -> KernelCall:
    num_tokens, num_seqs = len(call.query), len(call.metadata.seq_lens)
    rows = _prompt_rows(call)
    tile, num_stages = _tile(call, traits)
    few = call.metadata.max_query_len * call.group <= rows
    if not (_is_exact(call) or _is_big(call) or few or traits.shared_bytes < 128 << 10):
        rows = max(rows, 128)
        if rows == 128 and traits.is_sm_90_or_later:
            tile, num_stages = 128, 2  # 0.85 of the time on an H100
    tokens = rows // call.group
    return KernelCall(
        prefill_attention_kernel,
        (num_tokens // tokens + num_seqs, call.kv_pool.shape[1]),
        {"output": call.output, "num_seqs": num_seqs, **_inputs(call), **_strides(call)},
        {"TOKENS": tokens, "TILE": tile, "SKIP_DECODES": skip_decodes} | _shared_constants(call, rows, traits),
        num_warps=_prompt_warps(call, rows),
        num_stages=num_stages,
    )


def _is_exact(call: AttentionCall) -> bool:
    """Returns whether products are float32: their operands are held in registers, which allow few rows."""
    return call.query.dtype == torch.float32


def _is_big(call: AttentionCall) -> bool:
    """Returns whether heads are so wide that 128 rows would overflow registers."""
    return next_power_of_two(call.query.shape[2]) > 128


def _prompt_rows(call: AttentionCall) -> int:
    """Returns the least number of rows of a program that has several tokens of a sequence."""
    return max(32 if _is_exact(call) else 64, next_power_of_two(call.group))


def _prompt_warps(call: AttentionCall, rows: int) -> int:
    return 8 if _is_exact(call) or _is_big(call) or rows >= 128 else 4


def _tile(call: AttentionCall, traits: GpuTraits) -> tuple[int, int]:
    """Returns the tokens of a KV tile and the number of pipeline stages, such that the tiles in flight take at most
    half of shared memory."""
    if _is_exact(call):
        return 16, 2  # operands are in registers: see `_is_exact`
    row_bytes = 2 * next_power_of_two(call.query.shape[2]) * call.query.element_size()  # K and V
    for tile, stages in ((_TILE, 3), (_TILE, 2), (32, 2), (16, 2)):
        if tile * row_bytes * stages <= traits.shared_bytes // 2:
            return tile, stages
    return 16, 1


def _inputs(call: AttentionCall) -> dict[str, Tensor | int | float | None]:
    key_scale, value_scale = scales_of_pool(call.kv_pool, call.layer, call.kv_scales)
    return {
        "query": call.query,
        "kv_pool": call.kv_pool.view(torch.uint8) if call.kv_pool.dtype is FP8 else call.kv_pool,
        "block_tables": call.metadata.block_tables,
        "query_start_loc": call.metadata.query_start_loc,
        "seq_lens": call.metadata.seq_lens,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "layer": call.layer,
        "scale": call.scale * _LOG2_E,
        "window": call.sliding_window or 0,
    }


def _strides(call: AttentionCall) -> dict[str, int]:
    block, head, layer, value, token, _ = call.kv_pool.stride()
    return {
        "query_token_stride": call.query.stride(0),
        "query_head_stride": call.query.stride(1),
        "table_stride": call.metadata.block_tables.stride(0),
        "block_stride": block,
        "head_stride": head,
        "layer_stride": layer,
        "value_stride": value,
        "token_stride": token,
    }


def _shared_constants(call: AttentionCall, rows: int, traits: GpuTraits) -> dict[str, int | bool]:
    head_dim = call.query.shape[2]
    fp8 = call.kv_pool.dtype is FP8
    # Operands of `wgmma` come from shared memory, through which decoded tiles have to pass anyway.
    wgmma = rows >= 64 and traits.is_sm_90_or_later and not _is_exact(call)
    return {
        "GROUP": call.group,
        "ROWS": rows,
        "BLOCK_SIZE": call.kv_pool.shape[4],
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": next_power_of_two(max(32 if fp8 else 16, head_dim)),
        "WINDOWED": call.sliding_window is not None,
        "FP8": fp8,
        "CONVERT_FP8": fp8 and traits.converts_fp8,
        "PAIRS": fp8 and not wgmma,
        "DOT_FP32": widen_products(call.query.dtype),
    }
