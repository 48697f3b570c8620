// Vectors of eight floats: AVX2 with FMA and F16C. Included inside a namespace, under the matching target pragma.

#define PAGED_BF16_DOT 0
#define PAGED_BYTE_DOT 0
#define PAGED_INTEGER_DOT 1
#define PAGED_AMX 0
#define INLINE static inline __attribute__((always_inline))

using Reg = __m256;
inline constexpr int kWidth = 8;
inline constexpr int kRowBlock = 6;
inline constexpr int kWidenedRowBlock = 5;  // with six GCC 12 would keep sums in memory
inline constexpr int kColBlock = 2;

INLINE Reg splat(float value) { return _mm256_set1_ps(value); }
INLINE Reg load(const float* source) { return _mm256_loadu_ps(source); }
INLINE Reg load(const bf16* source) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
INLINE Reg load(const f16* source) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))); }
// Shifted by seven bits a code is a float16 but for the exponent's bias, which is larger by eight; bit 14 is the sign once more.
INLINE Reg load(const e4m3* source) {
  const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))), 7);
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_andnot_si128(_mm_set1_epi16(0x4000), shifted)), _mm256_set1_ps(256.0f));
}
INLINE void store(float* target, Reg value) { _mm256_storeu_ps(target, value); }
INLINE void store(bf16* target, Reg value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(packed));
}
INLINE void store(f16* target, Reg value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

INLINE Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
INLINE Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
INLINE Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
INLINE Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Reg magnitude(Reg a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
// A NaN in b is kept.
INLINE Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
INLINE float sum(Reg a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
INLINE float maximum(Reg a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
INLINE void sum4(Reg a, Reg b, Reg c, Reg d, float* target) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(target, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
INLINE void transpose(Reg* rows) {
  __m256 pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  __m256 quads[8];  // lane halves of columns 0..3 (and 4..7 in the upper half) of rows 0..3, then of rows 4..7
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}
// 2^n for whole n in [-126, 127].
INLINE Reg power_of_two(Reg n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE Reg round_to_whole(Reg a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Reg zero_below(Reg a, float limit, Reg value) {
  return _mm256_andnot_ps(_mm256_cmp_ps(a, _mm256_set1_ps(limit), _CMP_LT_OQ), value);
}

using Words = __m256i;
INLINE Words load_words(const std::uint8_t* source, std::uint32_t flip) {
  return _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)), _mm256_set1_epi32(static_cast<int>(flip)));
}
INLINE Words splat_words(const std::uint8_t* source) {
  std::int32_t word;
  std::memcpy(&word, source, sizeof word);
  return _mm256_set1_epi32(word);
}
// The bfloat16 in the lower or the upper half of every word.
INLINE Reg low_halves(Words words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); }
INLINE Reg high_halves(Words words) {
  return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
// A signed bit field of every word, as a float: shifted up until its sign is the word's, then down.
template <int kUp, int kDown>
INLINE Reg field(Words words) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, kUp), kDown));
}

#include "simd/partial.inl"

// Lane i: the first `count` pairs of low[i] and high[i], then zeros.
INLINE Reg interleave(const bf16* low, const bf16* high, int count) {
  if (count < kWidth) return interleave_n(low, high, count);
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
  return _mm256_castsi256_ps(_mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b)));
}
