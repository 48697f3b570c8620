"""The attention seam: writing KV into the paged pool and attending over it.

The pool is `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`; index 0 of the fourth axis is K, 1 is V.
A backend may assume that every block is contiguous, and nothing else about strides of queries, keys and values beyond
a contiguous last axis. The pool's element type is that of keys and values, or float8_e4m3fn: then the backend was made
with `KVScales`, encodes what it writes and widens what it reads (`kv_scales.py`).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens of a step belong to which sequence, and where their KV lives. All tensors are on the pool's device.

    Tokens of the step's sequences lie one after the other ("varlen"): sequence i owns query rows
    `query_start_loc[i] : query_start_loc[i + 1]`, and they are the last ones of its `seq_lens[i]` tokens.
    """

    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset of each new token
    block_tables: Tensor  # [num_seqs, max_num_blocks] int32, rows padded with 0
    query_start_loc: Tensor  # [num_seqs + 1] int32
    seq_lens: Tensor  # [num_seqs] int32, new tokens included
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens of a step whose results are read: the last token of some of its sequences, or of none. The other
    tokens are needed for their KV alone, and leave the step once the last layer has written it.
    """

    rows: Tensor  # [num_rows] int64: their indices among the step's tokens, ascending
    metadata: AttentionMetadata  # describes these tokens alone

    @classmethod
    def of(cls, metadata: AttentionMetadata, seqs: Tensor) -> "LastTokens":
        """Selects the last tokens of the sequences `seqs` (`[num_rows]` int64, ascending) of the step that `metadata`
        describes. Does not wait for the device."""
        rows = metadata.query_start_loc[1:][seqs].long() - 1
        alone = AttentionMetadata(
            slot_mapping=metadata.slot_mapping[rows],
            block_tables=metadata.block_tables[seqs],
            query_start_loc=torch.arange(len(seqs) + 1, dtype=torch.int32, device=seqs.device),
            seq_lens=metadata.seq_lens[seqs],
            max_query_len=1,
            max_seq_len=metadata.max_seq_len,
        )
        return cls(rows, alone)


class AttentionBackend(Protocol):
    """One implementation. Stateless between calls; its methods run on the caller's thread and return when done (or
    enqueued).
    """

    name: str

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
        """Does `fused.rotary` by `angles` (cos, sin) and stores the new tokens' `key` and `value`, both `[num_tokens,
        num_kv_heads, head_dim]`, at their slots of `layer`: `query` is rotated in place, `key` is stored rotated and
        undefined afterwards.
        """
        ...

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
        """Computes causal attention of `query` `[num_tokens, num_heads, head_dim]` over everything its sequences hold
        in `layer`.

        The KV of the query tokens must have been written before. Query head h reads KV head `h // (num_heads //
        num_kv_heads)`. With `sliding_window` w a token at position p sees positions p - w + 1 .. p. Softmax is
        accumulated in float32. Returns `[num_tokens, num_heads, head_dim]`, contiguous, in the query's dtype.
        """
        ...
