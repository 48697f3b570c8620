"""Names of KV blocks: a SHA-256 chain over token ids, rooted in everything that makes KV comparable.

Two blocks with the same name hold the same KV (up to rounding), whichever node computed them. `proto/block_hash.md`
specifies the bytes, and `proto/block_hash_vectors.json` has test vectors. Invariant: a name is a pure function of the
namespace and of the tokens up to the block's end.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""The content name of a block, 32 bytes."""

SCHEME_VERSION = 1
HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class KVNamespace:
    """What two nodes must have in common for the same tokens to have the same KV.

    `model_fingerprint`: digest of configuration, weights and compute dtype. `kv_dtype`: name of the pool's element
    type. `layout_id`: name of the block layout, heads and layers included. `block_size`: tokens per block.
    """

    model_fingerprint: bytes
    kv_dtype: str
    layout_id: str
    block_size: int

    def root(self, *, cache_salt: bytes = b"", adapter_digest: bytes = b"") -> BlockHash:
        """Returns the parent of every first block: SHA-256 over length-prefixed fields."""
        fields = (
            struct.pack("<I", SCHEME_VERSION),
            self.model_fingerprint,
            self.kv_dtype.encode(),
            self.layout_id.encode(),
            struct.pack("<I", self.block_size),
            adapter_digest,
            cache_salt,
        )
        encoded = b"".join(struct.pack("<I", len(field)) + field for field in fields)
        return BlockHash(hashlib.sha256(encoded).digest())


def next_block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Returns the name of the block that holds `token_ids` and follows `parent`. A partial block is named over the
    tokens it has."""
    return BlockHash(hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest())


def block_hashes(
    root: BlockHash, token_ids: Sequence[int], block_size: int, *, include_partial: bool = False
) -> Iterator[BlockHash]:
    """Yields the names of the full blocks of `token_ids` and, with `include_partial`, of the partial tail if there is
    one. Each is computed when it is asked for."""
    num_tokens = len(token_ids)
    end = num_tokens if include_partial else num_tokens - num_tokens % block_size
    parent = root
    for start in range(0, end, block_size):
        parent = next_block_hash(parent, token_ids[start : min(start + block_size, end)])
        yield parent
