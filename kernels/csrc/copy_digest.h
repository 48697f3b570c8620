// Copies that say what they have copied: XXH3-128 of every row, taken from the registers that are stored, so that each byte of the
// source is loaded once and a row that changes meanwhile cannot have the digest of what was not stored.
//
// XXH3 by Yann Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md: 128 bits, seed 0, the default secret, inputs of
// more than 240 bytes.
#pragma once

#include <cstdint>

namespace paged {

// Rows have whole stripes, and more bytes than those that XXH3 digests in other ways.
inline constexpr std::int64_t kStripeBytes = 64;
inline constexpr std::int64_t kShortestRow = 256;
inline constexpr std::int64_t kDigestBytes = 16;

// Whether the processor has the instructions (AVX2 or AVX-512) with which this is faster than a copy and the library's digest after it.
bool can_copy_rows();

// Needs can_copy_rows(). `digest` gets the canonical (big-endian) form. Stores go past the caches: whoever reads the copy does so later.
void copy_row(std::uint8_t* target, const std::uint8_t* source, std::int64_t num_bytes, std::uint8_t* digest);

}  // namespace paged
