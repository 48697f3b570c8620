#include "copy_digest.h"

#include <cstring>
#include <string_view>

#include "isa/instruction_set.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paged {
namespace {

constexpr std::uint64_t kPrime32[3] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr std::uint64_t kPrime64[5] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};
constexpr int kLanes = 8;
constexpr std::int64_t kBlockStripes = 16;
constexpr int kScrambleOffset = 128;
constexpr int kLastStripeOffset = 121;
constexpr int kLowOffset = 11;
constexpr int kHighOffset = 117;

alignas(64) constexpr std::uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

std::uint64_t secret_word(int offset, int lane) {
  std::uint64_t word;
  std::memcpy(&word, kSecret + offset + 8 * lane, sizeof word);
  return word;
}

// Offsets of the secret: 8 bytes further with every stripe of a block, and one of its own for the last stripe of a row.
struct Stripe {
  int secret;
  bool ends_block;
};
[[maybe_unused]] Stripe stripe_at(std::int64_t index, std::int64_t num_stripes) {
  if (index == num_stripes - 1) return {kLastStripeOffset, false};
  const auto in_block = static_cast<int>(index % kBlockStripes);
  return {8 * in_block, in_block == kBlockStripes - 1};
}

using CopyStripes = void (*)(std::uint8_t* target, const std::uint8_t* source, std::int64_t num_stripes, std::uint64_t* sums);

#if defined(__x86_64__)
// Stores that go past the caches need targets on a stripe's boundary.
template <bool kStreams>
__attribute__((target("avx512f"))) void copy_whole_stripes(std::uint8_t* target, const std::uint8_t* source, std::int64_t num_stripes,
                                                           std::uint64_t* sums) {
  __m512i sum = _mm512_loadu_si512(sums);
  const __m512i prime = _mm512_set1_epi64(static_cast<long long>(kPrime32[0]));
  const __m512i scramble = _mm512_loadu_si512(kSecret + kScrambleOffset);
  for (std::int64_t index = 0; index < num_stripes; ++index) {
    const Stripe stripe = stripe_at(index, num_stripes);
    __m512i words = _mm512_loadu_si512(source + index * kStripeBytes);
    asm("" : "+v"(words));  // loaded once: what is stored is what is digested, whoever writes to the source meanwhile
    std::uint8_t* to = target + index * kStripeBytes;
    if (kStreams) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), words);
    } else {
      _mm512_storeu_si512(to, words);
    }
    const __m512i key = _mm512_xor_si512(words, _mm512_loadu_si512(kSecret + stripe.secret));
    const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    sum = _mm512_add_epi64(product, _mm512_add_epi64(sum, _mm512_shuffle_epi32(words, _MM_PERM_BADC)));
    if (!stripe.ends_block) continue;
    sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), scramble);
    const __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime), 32);
    sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), high);
  }
  _mm512_storeu_si512(sums, sum);
  _mm_sfence();
}

// The same with half a stripe in a register.
template <bool kStreams>
__attribute__((target("avx2"))) void copy_half_stripes(std::uint8_t* target, const std::uint8_t* source, std::int64_t num_stripes,
                                                       std::uint64_t* sums) {
  constexpr int kHalfBytes = 32;
  const auto load = [](const void* bytes) __attribute__((target("avx2"))) { return _mm256_loadu_si256(static_cast<const __m256i*>(bytes)); };
  __m256i sum[2] = {load(sums), load(sums + kLanes / 2)};
  const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(kPrime32[0]));
  const __m256i scramble[2] = {load(kSecret + kScrambleOffset), load(kSecret + kScrambleOffset + kHalfBytes)};
  for (std::int64_t index = 0; index < num_stripes; ++index) {
    const Stripe stripe = stripe_at(index, num_stripes);
    for (int half = 0; half < 2; ++half) {
      const std::int64_t at = index * kStripeBytes + half * kHalfBytes;
      __m256i words = load(source + at);
      asm("" : "+x"(words));
      auto* to = reinterpret_cast<__m256i*>(target + at);
      if (kStreams) {
        _mm256_stream_si256(to, words);
      } else {
        _mm256_storeu_si256(to, words);
      }
      const __m256i key = _mm256_xor_si256(words, load(kSecret + stripe.secret + half * kHalfBytes));
      const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
      sum[half] = _mm256_add_epi64(product, _mm256_add_epi64(sum[half], _mm256_shuffle_epi32(words, 0x4e)));
      if (!stripe.ends_block) continue;
      const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sum[half], _mm256_srli_epi64(sum[half], 47)), scramble[half]);
      const __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime), 32);
      sum[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), high);
    }
  }
  for (int half = 0; half < 2; ++half) _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums) + half, sum[half]);
  _mm_sfence();
}
#endif

std::uint64_t merged(const std::uint64_t* sums, int offset, std::uint64_t start) {
  std::uint64_t result = start;
  for (int lane = 0; lane < kLanes; lane += 2) {
    const auto product = static_cast<unsigned __int128>(sums[lane] ^ secret_word(offset, lane)) * (sums[lane + 1] ^ secret_word(offset, lane + 1));
    result += static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }
  result = (result ^ (result >> 37)) * 0x165667919E3779F9;
  return result ^ (result >> 32);
}

void store_big_endian(std::uint8_t* target, std::uint64_t word) {
  for (int byte = 0; byte < 8; ++byte) target[byte] = static_cast<std::uint8_t>(word >> (56 - 8 * byte));
}

// Returns null where neither is faster than a copy and the library's digest after it.
CopyStripes copy_stripes([[maybe_unused]] bool streams) {
#if defined(__x86_64__)
  const std::string_view name = kernels().name;
  if (name == "avx2" || kernels().emulates_avx512) return streams ? copy_half_stripes<true> : copy_half_stripes<false>;
  if (name != "portable") return streams ? copy_whole_stripes<true> : copy_whole_stripes<false>;
#endif
  return nullptr;
}

}  // namespace

bool can_copy_rows() { return copy_stripes(false) != nullptr; }

void copy_row(std::uint8_t* target, const std::uint8_t* source, std::int64_t num_bytes, std::uint8_t* digest) {
  std::uint64_t sums[kLanes] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2], kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  copy_stripes(reinterpret_cast<std::uintptr_t>(target) % kStripeBytes == 0)(target, source, num_bytes / kStripeBytes, sums);
  const auto length = static_cast<std::uint64_t>(num_bytes);
  store_big_endian(digest, merged(sums, kHighOffset, ~(length * kPrime64[1])));
  store_big_endian(digest + 8, merged(sums, kLowOffset, length * kPrime64[0]));
}

}  // namespace paged
