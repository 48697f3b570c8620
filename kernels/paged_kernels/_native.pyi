"""The compiled extension. Tensors are borrowed through DLPack; `native.py`, `fused.py` and `quantized.py` say what the
arguments mean.

Raises ValueError for shapes, strides or element types that do not fit, IndexError for blocks and slots outside the
pool.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels.base import AttentionMetadata, LastTokens

def instruction_set() -> str:
    """Returns the instruction set in use: `amx_bf16`, `avx512_bf16`, `avx512_vnni`, `avx512`, `avx2` or `portable`."""

def available_instruction_sets() -> list[str]:
    """Returns the sets that this processor can run, best first. Builds for tests add the others on emulations, last;
    their names end in `_emulated`."""

def set_instruction_set(name: str) -> None:
    """Forces one for the whole process, for tests and measurements. Raises ValueError if the processor lacks it."""

def start_together(whether: bool) -> None:
    """Whether a call waits until all of its threads have come, as tests want it; without, late ones find less to do."""

class ThreadLimit:
    """Limits the threads of all calls of the process between `begin` and `end` to the number in `word`, two bytes of
    memory that other processes may change at any time: a call that goes on then takes or leaves threads. The memory is
    kept for ever."""

    def __init__(self, word: memoryview) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...

def write_kv(
    key: Tensor,
    value: Tensor,
    kv_pool: Tensor,
    layer: int,
    slot_mapping: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    num_threads: int,
) -> None: ...
def paged_attention(
    output: Tensor,
    query: Tensor,
    kv_pool: Tensor,
    layer: int,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    num_threads: int,
) -> None: ...
def rms_norm(out: Tensor, x: Tensor, weight: Tensor, epsilon: float, num_threads: int) -> None: ...
def add_rms_norm(
    out: Tensor,
    residual_out: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    num_threads: int,
) -> None: ...
def silu_mul(out: Tensor, gate_up: Tensor, num_threads: int) -> None: ...
def rotary(x: Tensor, cos: Tensor, sin: Tensor, num_threads: int) -> None: ...
def pack_rows(
    packed: Tensor,
    scales: Tensor,
    weight: Tensor,
    first_output: int,
    num_outputs: int,
    bits: int,
    group_size: int,
    num_threads: int,
) -> None: ...
def quantized_matmul(
    out: Tensor,
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    num_threads: int,
) -> None: ...
def dequantize(
    out: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group_size: int, num_threads: int
) -> None: ...
def fill_panels(packed: Tensor, weight: Tensor, first_output: int, num_outputs: int, num_threads: int) -> None: ...
def take_rows(out: Tensor, packed: Tensor, outputs: Tensor, num_outputs: int, num_threads: int) -> None: ...
def packed_matmul(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None, num_threads: int) -> None: ...
def sample_tokens(
    logits: list[Tensor],
    temperatures: list[float],
    top_ks: list[int],
    top_ps: list[float],
    min_ps: list[float],
    seeds: list[int],
    positions: list[int],
    choices: list[int],
    num_threads: int,
) -> list[int]: ...
def token_logprobs(
    logits: list[Tensor], token_ids: list[int], num_top: int, num_threads: int
) -> tuple[bytes, bytes, bytes, bytes]:
    """Returns, one row after the other, the log-probabilities of `token_ids` (float32) and their ranks (uint32), then
    the ids of the `num_top` most likely tokens (uint32) and their log-probabilities (float32)."""

def prefer_huge_pages(tensor: Tensor) -> None: ...
def take_huge_pages(bytes: Tensor) -> None: ...
def map_file(descriptor: int, offset: int, num_bytes: int, shared: bool) -> Tensor:
    """Returns `[num_bytes]` uint8, aligned as the offset is to pages of 2 MiB. Raises MemoryError if the system refuses
    to map so much."""

def can_copy_rows() -> bool: ...
def copy_rows(
    target: NDArray[np.uint8],
    target_rows: list[int],
    source: NDArray[np.uint8],
    source_rows: list[int],
    row_bytes: int,
) -> bytes: ...

class Projection: ...

class LayerStack:
    def __init__(
        self,
        final_norm: Tensor,
        epsilon: float,
        scale: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None: ...
    def add(
        self,
        qkv: Projection,
        output: Projection,
        gate_up: Projection,
        down: Projection,
        input_norm: Tensor,
        norm: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        window: int,
    ) -> None: ...
    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_pool: Tensor,
        metadata: AttentionMetadata,
        last_tokens: LastTokens | None,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        num_threads: int,
    ) -> None: ...

def packed_projection(panels: Tensor, bias: Tensor | None, num_outputs: int, num_inputs: int) -> Projection: ...
def quantized_projection(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    num_outputs: int,
    num_inputs: int,
    bits: int,
    group_size: int,
) -> Projection: ...
