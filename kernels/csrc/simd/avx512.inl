// Vectors of sixteen floats: AVX-512 F, BW, DQ and VL, and with PAGED_BF16_DOT its bfloat16 dot products. Included inside a namespace,
// for the matching target; PAGED_BF16_DOT and PAGED_BYTE_DOT (VNNI) are set by the including file.

#if PAGED_EMULATE_AVX512
#include "simd/avx512_emulation.inl"
#endif

#define PAGED_INTEGER_DOT PAGED_BYTE_DOT
#define INLINE static inline __attribute__((always_inline))

using Reg = __m512;
inline constexpr int kWidth = 16;
inline constexpr int kRowBlock = 6;
inline constexpr int kWidenedRowBlock = 6;
inline constexpr int kColBlock = 4;

INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
INLINE Reg widen_bf16(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }

INLINE Reg splat(float value) { return _mm512_set1_ps(value); }
INLINE Reg load(const float* source) { return _mm512_loadu_ps(source); }
INLINE Reg load(const bf16* source) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source))); }
INLINE Reg load(const f16* source) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source))); }
// Shifted by seven bits a code is a float16 but for the exponent's bias, which is larger by eight; bit 14 is the sign once more.
INLINE Reg widen_e4m3(__m128i codes) {
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_andnot_si256(_mm256_set1_epi16(0x4000), shifted)), _mm512_set1_ps(256.0f));
}
INLINE Reg load(const e4m3* source) { return widen_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))); }
INLINE Reg load_n(const e4m3* source, int n) { return widen_e4m3(_mm_maskz_loadu_epi8(first_lanes(n), source)); }
INLINE Reg load_n(const float* source, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), source); }
// The first n elements, of which there may be fewer than none or more than a vector's, and `other` in the lanes behind them.
INLINE Reg load_first(const float* source, int n, float other) {
  const int count = n < 0 ? 0 : n < kWidth ? n : kWidth;
  return _mm512_mask_loadu_ps(_mm512_set1_ps(other), first_lanes(count), source);
}
INLINE Reg load_n(const bf16* source, int n) { return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), source)); }
INLINE Reg load_n(const f16* source, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), source)); }

#if PAGED_BF16_DOT
INLINE __m256i narrow_bf16(Reg value) { return (__m256i)_mm512_cvtneps_pbh(value); }
#else
INLINE __m256i narrow_bf16(Reg value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(rounded);
}
#endif
INLINE __m256i narrow_f16(Reg value) { return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }
INLINE Reg rounded(Reg value, bf16) { return widen_bf16(narrow_bf16(value)); }
INLINE Reg rounded(Reg value, f16) { return _mm512_cvtph_ps(narrow_f16(value)); }
INLINE void store(float* target, Reg value) { _mm512_storeu_ps(target, value); }
INLINE void store(bf16* target, Reg value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow_bf16(value)); }
INLINE void store(f16* target, Reg value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow_f16(value)); }
INLINE void store_n(float* target, Reg value, int n) { _mm512_mask_storeu_ps(target, first_lanes(n), value); }
INLINE void store_n(bf16* target, Reg value, int n) { _mm256_mask_storeu_epi16(target, first_lanes(n), narrow_bf16(value)); }
INLINE void store_n(f16* target, Reg value, int n) { _mm256_mask_storeu_epi16(target, first_lanes(n), narrow_f16(value)); }

INLINE Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
INLINE Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
INLINE Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
INLINE Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
// 1 / a for a normal number, relative error below 2^-23: an estimate and one step of Newton's.
INLINE Reg reciprocal(Reg a) {
  const Reg estimate = _mm512_rcp14_ps(a);
  return _mm512_mul_ps(estimate, _mm512_fnmadd_ps(a, estimate, _mm512_set1_ps(2.0f)));
}
INLINE Reg magnitude(Reg a) { return _mm512_abs_ps(a); }
// A NaN in b is kept.
INLINE Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
INLINE float sum(Reg a) { return _mm512_reduce_add_ps(a); }
INLINE float maximum(Reg a) { return _mm512_reduce_max_ps(a); }
INLINE __m256 fold(Reg a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
INLINE void sum4(Reg a, Reg b, Reg c, Reg d, float* target) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
  _mm_storeu_ps(target, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
INLINE void transpose(Reg* rows) {
  __m512 pairs[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  __m512 quads[16];  // quads[4 i + j]: column j of every 128-bit lane, for rows 4 i .. 4 i + 3
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 even_low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0x88);      // lanes 0, 2 of row groups 0, 1
    const __m512 odd_low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0xdd);       // lanes 1, 3
    const __m512 even_high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0x88);  // the same of row groups 2, 3
    const __m512 odd_high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    rows[4 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    rows[8 + j] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    rows[12 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}
INLINE Reg power_of_two(Reg n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }
INLINE Reg round_to_whole(Reg a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Reg zero_below(Reg a, float limit, Reg value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, _mm512_set1_ps(limit), _CMP_NLT_UQ), value);
}

// a less the whole number below it; 0 for -infinity.
INLINE Reg fraction(Reg a) { return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// value times 2 to the whole number below a; 0 where a is below the limit.
INLINE Reg scale_from(Reg a, float limit, Reg value) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(a, _mm512_set1_ps(limit), _CMP_NLT_UQ), value, a);
}

// Lane i: the first `count` pairs of low[i] and high[i], then zeros.
INLINE Reg interleave(const bf16* low, const bf16* high, int count) {
  const bool whole = count == kWidth;  // unmasked loads widen on the way
  const __m512i a = _mm512_cvtepu16_epi32(whole ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low))
                                                : _mm256_maskz_loadu_epi16(first_lanes(count), low));
  const __m512i b = _mm512_cvtepu16_epi32(whole ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high))
                                                : _mm256_maskz_loadu_epi16(first_lanes(count), high));
  return _mm512_castsi512_ps(_mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
}

#if PAGED_BF16_DOT
// c + a . b over pairs of bfloat16; a and b hold two values in each 32-bit lane.
INLINE Reg dot_pairs(Reg a, Reg b, Reg c) {
  return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
// 32 codes as bfloat16, exactly. Those below 2^-6 come from a table, since dot products take subnormal bfloat16 for zero.
INLINE Reg pairs_of_e4m3(__m256i codes) {
  const __m512i table = _mm512_castsi128_si512(_mm_set_epi16(0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0));
  const __m512i wide = _mm512_cvtepi8_epi16(codes);
  const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x07f0));
  const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(0x3c00));
  const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(0x0080));
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, small, wide, table);
  constexpr int kFirstOrBothOthers = 0xf8;
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(value, wide, _mm512_set1_epi16(static_cast<short>(0x8000)), kFirstOrBothOthers));
}
// The first `count` <= kWidth pairs of a row.
INLINE Reg load_pairs(const e4m3* source, int count) {
  if (count >= kWidth) return pairs_of_e4m3(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  return pairs_of_e4m3(_mm256_maskz_loadu_epi8((1u << (2 * count)) - 1u, source));
}
INLINE Reg interleave(const e4m3* low, const e4m3* high, int count) {
  const __m128i a = _mm_maskz_loadu_epi8(first_lanes(count), low);
  const __m128i b = _mm_maskz_loadu_epi8(first_lanes(count), high);
  return pairs_of_e4m3(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
}
#endif

using Words = __m512i;
INLINE Words load_words(const std::uint8_t* source, std::uint32_t flip) {
  return _mm512_xor_si512(_mm512_loadu_si512(source), _mm512_set1_epi32(static_cast<int>(flip)));
}
INLINE Words splat_words(const std::uint8_t* source) {
  std::int32_t word;
  std::memcpy(&word, source, sizeof word);
  return _mm512_set1_epi32(word);
}
// The bfloat16 in the lower or the upper half of every word.
INLINE Reg low_halves(Words words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
INLINE Reg high_halves(Words words) {
  return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
// A signed bit field of every word, as a float: shifted up until its sign is the word's, then down.
template <int kUp, int kDown>
INLINE Reg field(Words words) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, kUp), kDown));
}
