"""The canonical KV block: `[num_kv_heads, num_layers, 2, block_size, head_dim]`, one contiguous run of bytes.

A pool is `[num_blocks, *block]`. Heads are outermost, so that a tensor-parallel rank with the heads [a, b) has one
contiguous range of the block's bytes, and a block is the same for every tensor-parallel degree.
"""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one block. `dtype` is the name of a torch dtype without the prefix. `scales_digest` identifies the
    scales of FP8 values, because the same bytes under other scales are other KV; it is empty unless the dtype is FP8.
    """

    num_kv_heads: int
    num_layers: int
    block_size: int
    head_dim: int
    dtype: str
    scales_digest: str = ""

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_kv_heads, self.num_layers, 2, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        elements = self.num_kv_heads * self.num_layers * 2 * self.block_size * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def layout_id(self) -> str:
        """Returns the name of the arrangement and meaning of a block's bytes, which is part of every block's name and
        header."""
        arrangement = f"hl2td/{self.num_kv_heads}x{self.num_layers}x2x{self.block_size}x{self.head_dim}/{self.dtype}"
        return f"{arrangement}/{self.scales_digest}" if self.scales_digest else arrangement

    def num_blocks_for(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.block_size)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Counts the blocks that a sequence of so many tokens needs; the last one may be partial."""
    return -(-num_tokens // block_size)
