"""The canonical KV block: `[num_kv_heads, num_layers, 2, block_size, head_dim]`, one contiguous run of bytes.

A pool is `[num_blocks, *block]`. Heads are outermost, so a tensor-parallel rank that owns heads [a, b) owns one
contiguous byte range of the block, and a block means the same to every tensor-parallel degree.
"""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one block. `dtype` is a torch dtype name without the prefix. `scales_digest` names what an FP8 value is
    multiplied with: bytes that were stored with other scales mean other KV. Empty unless the dtype is FP8.
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
        """Names the arrangement of bytes and what they mean; part of every block's name and of every header."""
        arrangement = f"hl2td/{self.num_kv_heads}x{self.num_layers}x2x{self.block_size}x{self.head_dim}/{self.dtype}"
        return f"{arrangement}/{self.scales_digest}" if self.scales_digest else arrangement

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
