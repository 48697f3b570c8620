"""XXH3-128 of blocks where they lie: the digest that block headers carry, without copying a block to the host."""

import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paged_kernels.gpu.device.payload_digest import digest_kernel, kib_sums_kernel
from paged_kernels.gpu.launch import KernelCall, ceil_divide, launch

STRIPE_BYTES = 64  # payloads are whole stripes
LEAST_BYTES = 256  # shorter payloads have another algorithm

_KIBS_AT_ONCE = 16
_MOST_BLOCKS = 256  # a launch: the sums take a sixteenth of the blocks' memory
_MASK = (1 << 64) - 1
# XXH3's default secret and primes.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8"
    "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb17"
    "0ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_START = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])


class BlockDigests:
    """The digests of one pool's rows, `[num_blocks, block_bytes]` uint8, contiguous."""

    def __init__(self, rows: Tensor) -> None:
        """Raises ValueError for blocks that are too small or no whole stripes."""
        if rows.shape[1] % STRIPE_BYTES or rows.shape[1] < LEAST_BYTES:
            raise ValueError(f"blocks of {rows.shape[1]} bytes: not a multiple of {STRIPE_BYTES}, or too small")
        self._words = rows.view(torch.int64)  # [num_blocks, block_bytes / 8]
        self._keys = torch.tensor(key_table(), dtype=torch.int64, device=rows.device)

    def __call__(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns the digests of `block_ids`, in their order, as the blocks are when the current stream gets there.
        Waits for the stream."""
        digests = torch.empty(len(block_ids), 2, dtype=torch.int64, device=self._words.device)
        wanted = torch.tensor(block_ids, dtype=torch.int64, device=self._words.device)
        for start in range(0, len(block_ids), _MOST_BLOCKS):
            part = slice(start, start + _MOST_BLOCKS)
            launch(plan_digests(digests[part], self._words, wanted[part], self._keys))
        return [struct.pack(">qq", high, low) for low, high in digests.tolist()]


def plan_digests(digests: Tensor, words: Tensor, block_ids: Tensor, keys: Tensor) -> Iterator[KernelCall]:
    """Plans the digests of `block_ids`. `digests` `[n, 2]` int64: low and high half; `words` `[num_blocks, block
    words]` int64; `block_ids` `[n]` int64; `keys`: `key_table`."""
    count, num_words = len(block_ids), words.shape[1]
    num_kibs = ceil_divide(num_words, 128)
    sums = torch.empty(count, num_kibs, 8, dtype=torch.int64, device=words.device)
    yield KernelCall(
        kib_sums_kernel,
        (count, ceil_divide(num_kibs, _KIBS_AT_ONCE)),
        {
            "sums": sums,
            "rows": words,
            "block_ids": block_ids,
            "keys": keys,
            "num_words": num_words,
            "num_kibs": num_kibs,
        },
        {"KIBS": _KIBS_AT_ONCE},
    )
    num_bytes = 8 * num_words
    yield KernelCall(
        digest_kernel,
        (count,),
        {
            "digests": digests,
            "sums": sums,
            "keys": keys,
            "low_start": _signed(num_bytes * _PRIME64[0]),
            "high_start": _signed(~(num_bytes * _PRIME64[1])),
        },
        {"NUM_KIBS": num_kibs},
        num_warps=1,
    )


def key_table() -> list[int]:
    """Returns what the kernels look up, as signed words: those of the secret for stripes (byte 0), scrambling (128),
    the last stripe (121), the low half (11) and the high half (117); and the lanes' first values."""
    words = [*_secret_words(0, 23), *_secret_words(128, 8), *_secret_words(121, 8)]
    words += [*_secret_words(11, 8), *_secret_words(117, 8), *_START]
    return [_signed(word) for word in words]


def _secret_words(offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", _SECRET, offset)


def _signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word
