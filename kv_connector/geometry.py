"""What all blocks of a pool have in common; two nodes need the same to exchange any.

This module fills in the headers of blocks and compares received headers with the requested blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_connector.header import BlockHeader, Mismatch, encoded_before_digest, layout_digest
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layout and size of a pool's blocks."""

    layout_digest: bytes  # 16 bytes, see header.py
    block_bytes: int

    @classmethod
    def of(cls, layout: KVLayout) -> "Geometry":
        return cls(layout_digest(layout), layout.block_bytes)

    def mismatch(self, other: "Geometry") -> Mismatch | None:
        """Returns the reason to refuse every block of a pool with the geometry `other`, if there is one."""
        if self.layout_digest != other.layout_digest:
            return Mismatch.LAYOUT
        return None if self.block_bytes == other.block_bytes else Mismatch.LENGTH

    def header(self, block: NamedBlock, epoch: int, payload_digest: bytes) -> BlockHeader:
        """Returns the header of a block whose content has that digest, published by the node of that epoch."""
        return BlockHeader(
            block_hash=block.block_hash,
            layout_digest=self.layout_digest,
            payload_bytes=self.block_bytes,
            num_tokens=block.num_tokens,
            epoch=epoch,
            payload_digest=payload_digest,
        )

    def verify(self, header: BlockHeader, block: NamedBlock, *, epoch: int | None) -> Mismatch | None:
        """Returns the first field that is not that of the requested block, or None; see `BlockHeader.verify`."""
        return header.verify(
            block_hash=block.block_hash,
            layout_digest=self.layout_digest,
            payload_bytes=self.block_bytes,
            num_tokens=block.num_tokens,
            epoch=epoch,
        )

    def headers_before_digest(self, blocks: Sequence[NamedBlock], epoch: int) -> bytes:
        """Returns, one after the other, what the headers of these blocks have before the digest if the node of that
        epoch has published them."""
        layout_digest, size = self.layout_digest, self.block_bytes
        return b"".join(
            [encoded_before_digest(block.block_hash, layout_digest, size, block.num_tokens, epoch) for block in blocks]
        )
