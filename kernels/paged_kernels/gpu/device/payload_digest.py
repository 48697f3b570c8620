"""XXH3-128 of whole KV blocks, cut where it can be: what each KiB adds, for all at once; then KiB after KiB.

The algorithm is XXH3's for long inputs with its default secret and seed 0 (https://github.com/Cyan4973/xxHash,
`doc/xxhash_spec.md`): eight 64-bit lanes take up 64-byte stripes, and are scrambled after each KiB. What a KiB adds
to the lanes does not depend on them, so that only the scrambling is a chain. Words are little-endian, 64 bits; a lane
is kept with its neighbour: lanes 0, 2, 4, 6 are `even`, 1, 3, 5, 7 `odd`.
"""

import triton
import triton.language as tl

# Where the parts of the table begin, in words; see `gpu/digest.py`, which makes it.
SCRAMBLE_KEY: tl.constexpr = tl.constexpr(23)  # before it: key words of stripes
LAST_KEY: tl.constexpr = tl.constexpr(31)
LOW_KEY: tl.constexpr = tl.constexpr(39)
HIGH_KEY: tl.constexpr = tl.constexpr(47)
START: tl.constexpr = tl.constexpr(55)


@triton.jit
def kib_sums_kernel(sums, rows, block_ids, keys, num_words, num_kibs, KIBS: tl.constexpr):
    """Program (i, j): KiBs `[j * KIBS, (j + 1) * KIBS)` of block `block_ids[i]`. `rows` `[blocks, num_words]`, `sums`
    `[grid 0, num_kibs, 8]`."""
    digest = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids + digest)
    kib = tl.program_id(1) * KIBS + tl.arange(0, KIBS)[:, None, None]
    stripe = tl.arange(0, 16)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    first = kib * 128 + stripe * 8
    there = first < num_words
    row = rows + block * num_words
    own = tl.load(row + first + lane, mask=there, other=0).to(tl.uint64, bitcast=True)
    neighbour = tl.load(row + first + (lane ^ 1), mask=there, other=0).to(tl.uint64, bitcast=True)
    is_last = first + 8 == num_words
    key = tl.load(keys + tl.where(is_last, LAST_KEY + lane, stripe + lane)).to(tl.uint64, bitcast=True)
    mixed = own ^ key
    added = tl.where(there, neighbour + (mixed & 0xFFFFFFFF) * (mixed >> 32), 0)
    total = tl.sum(added, axis=1)  # [KIBS, 8]
    kibs = tl.program_id(1) * KIBS + tl.arange(0, KIBS)[:, None]
    lanes = tl.arange(0, 8)[None, :]
    target = sums + (digest * num_kibs + kibs) * 8 + lanes
    tl.store(target, total.to(tl.int64, bitcast=True), mask=kibs < num_kibs)


@triton.jit
def digest_kernel(digests, sums, keys, low_start, high_start, NUM_KIBS: tl.constexpr):
    """Program i: `digests[i]`, `[2]`: the low and the high half."""
    digest = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, 4) * 2
    even, odd = _words(keys + START + pair)
    even_key, odd_key = _words(keys + SCRAMBLE_KEY + pair)
    own = sums + digest * NUM_KIBS * 8 + pair
    for kib in tl.range(0, NUM_KIBS - 1, loop_unroll_factor=8):
        even_sum, odd_sum = _words(own + kib * 8)
        even = _scramble(even + even_sum, even_key)
        odd = _scramble(odd + odd_sum, odd_key)
    even_sum, odd_sum = _words(own + (NUM_KIBS - 1) * 8)
    even += even_sum
    odd += odd_sum
    even_key, odd_key = _words(keys + LOW_KEY + pair)
    low = _merge(even ^ even_key, odd ^ odd_key, low_start)
    even_key, odd_key = _words(keys + HIGH_KEY + pair)
    high = _merge(even ^ even_key, odd ^ odd_key, high_start)
    tl.store(digests + digest * 2, low)
    tl.store(digests + digest * 2 + 1, high)


@triton.jit
def _words(pointers):
    """Loads the words at these places, and the words right behind them."""
    even = tl.load(pointers).to(tl.uint64, bitcast=True)
    return even, tl.load(pointers + 1).to(tl.uint64, bitcast=True)


@triton.jit
def _scramble(lanes, key):
    return (lanes ^ (lanes >> 47) ^ key) * 0x9E3779B1


@triton.jit
def _merge(even, odd, start):
    """Returns the folded sum of the 128-bit products after the last mixing, as an int64 with its bits."""
    folded = tl.sum((even * odd) ^ tl.umulhi(even, odd), axis=0)
    mixed = folded + start.to(tl.uint64, bitcast=True)
    mixed = (mixed ^ (mixed >> 37)) * 0x165667919E3779F9
    return (mixed ^ (mixed >> 32)).to(tl.int64, bitcast=True)
