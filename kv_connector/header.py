"""The header with which every block travels, and the checks that a received block has to pass.

96 bytes, little-endian, no padding:

    offset  size  field
    0       4     magic "KVRB"
    4       4     header version (uint32)
    8       32    block hash
    40      16    layout digest: the first 16 bytes of SHA-256 over the layout id
    56      8     payload bytes (uint64)
    64      4     number of valid tokens (uint32)
    68      4     zero
    72      8     epoch of the node that published it (uint64)
    80      16    XXH3-128 of the whole payload, canonical (big-endian) form

Invariant: a block counts as received only if each field is that of the requested block and the digest of the payload
that arrived is the header's. Only the epoch is not compared where any node may have stored the block (Redis).
"""

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum

import xxhash

from kvrelay.core.kv.block_hash import HASH_BYTES, BlockHash
from kvrelay.core.kv.layout import KVLayout

HEADER_VERSION = 1
HASH_OFFSET = 8

_MAGIC = b"KVRB"
_FIELDS = "<4sI32s16sQIIQ"
_BEFORE_DIGEST = struct.Struct(_FIELDS)
_HEADER = struct.Struct(_FIELDS + "16s")
DIGEST_OFFSET = _BEFORE_DIGEST.size
HEADER_BYTES = _HEADER.size


class Mismatch(Enum):
    """The field for which a block was refused."""

    VERSION = "version"  # or the bytes are no header at all
    HASH = "hash"
    LAYOUT = "layout"
    LENGTH = "length"
    TOKENS = "tokens"
    EPOCH = "epoch"
    DIGEST = "digest"


def layout_digest(layout: KVLayout) -> bytes:
    """Returns the 16 bytes that stand for the layout id in headers."""
    return hashlib.sha256(layout.layout_id.encode()).digest()[:16]


def payload_digest(payload: bytes | memoryview) -> bytes:
    """Returns 16 bytes over a whole block. Fast, not cryptographic: it finds torn and damaged copies, no forgeries."""
    return xxhash.xxh3_128_digest(payload)


def encoded_before_digest(
    block_hash: BlockHash, layout_digest: bytes, payload_bytes: int, num_tokens: int, epoch: int
) -> bytes:
    """Returns the first `DIGEST_OFFSET` bytes of the header with these fields."""
    return _BEFORE_DIGEST.pack(_MAGIC, HEADER_VERSION, block_hash, layout_digest, payload_bytes, num_tokens, 0, epoch)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The publisher's description of a block."""

    block_hash: BlockHash
    layout_digest: bytes
    payload_bytes: int
    num_tokens: int
    epoch: int
    payload_digest: bytes
    magic: bytes = _MAGIC
    version: int = HEADER_VERSION

    def encode(self) -> bytes:
        """Returns the `HEADER_BYTES` described above."""
        assert len(self.block_hash) == HASH_BYTES
        return _HEADER.pack(
            self.magic,
            self.version,
            self.block_hash,
            self.layout_digest,
            self.payload_bytes,
            self.num_tokens,
            0,
            self.epoch,
            self.payload_digest,
        )

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "BlockHeader":
        """Returns the header in exactly `HEADER_BYTES` bytes. Any bytes decode; `verify` judges them."""
        magic, version, name, layout, payload_bytes, num_tokens, _, epoch, digest = _HEADER.unpack(data)
        return cls(BlockHash(name), layout, payload_bytes, num_tokens, epoch, digest, magic, version)

    def verify(
        self, *, block_hash: BlockHash, layout_digest: bytes, payload_bytes: int, num_tokens: int, epoch: int | None
    ) -> Mismatch | None:
        """Returns the first field that is not that of the requested block, or None. Without an `epoch` any node may
        have published it."""
        if (self.magic, self.version) != (_MAGIC, HEADER_VERSION):
            return Mismatch.VERSION
        if self.block_hash != block_hash:
            return Mismatch.HASH
        if self.layout_digest != layout_digest:
            return Mismatch.LAYOUT
        if self.payload_bytes != payload_bytes:
            return Mismatch.LENGTH
        if self.num_tokens != num_tokens:
            return Mismatch.TOKENS
        if epoch is not None and self.epoch != epoch:
            return Mismatch.EPOCH
        return None

    def verify_payload(self, digest: bytes) -> Mismatch | None:
        """Compares the header's digest with that of the payload that arrived."""
        return None if self.payload_digest == digest else Mismatch.DIGEST
