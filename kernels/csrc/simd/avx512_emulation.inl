// The instructions of AVX-512 that the kernels use as functions, one to one, so that what is written for it is tested on processors with
// AVX2 alone. Masked loads and stores touch no lane but the selected ones, reciprocals have fourteen bits and no more, and instructions
// for bfloat16 take subnormal numbers for zero.
// Included before the kernels, in their namespace, where these functions hide the compiler's, some of which are macros until then.

#undef _mm512_cmp_ps_mask
#undef _mm512_cvtps_ph
#undef _mm512_extractf32x8_ps
#undef _mm512_reduce_ps
#undef _mm512_roundscale_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_ps
#undef _mm512_slli_epi16
#undef _mm512_slli_epi32
#undef _mm512_srai_epi32
#undef _mm512_srli_epi16
#undef _mm512_srli_epi32
#undef _mm512_ternarylogic_epi32

#define EMULATED [[maybe_unused]] static inline __attribute__((always_inline))

using Ints = std::int32_t __attribute__((vector_size(64)));
using Unsigned = std::uint32_t __attribute__((vector_size(64)));
using Shorts = std::int16_t __attribute__((vector_size(64)));
using UnsignedShorts = std::uint16_t __attribute__((vector_size(64)));

// The lanes of a vector.
template <class T, class Vector>
struct Lanes {
  static constexpr int kCount = sizeof(Vector) / sizeof(T);
  T at[kCount];

  Lanes() = default;
  explicit Lanes(const Vector& vector) { std::memcpy(at, &vector, sizeof at); }
  Vector vector() const {
    Vector vector;
    std::memcpy(&vector, at, sizeof at);
    return vector;
  }
};
using Floats = Lanes<float, __m512>;
using Halves = Lanes<__m256, __m512>;

// The vector whose lane i is lane(i).
template <class Vector, class Lane>
EMULATED Vector each(const Lane& lane) {
  Lanes<decltype(lane(0)), Vector> result;
  for (int i = 0; i < result.kCount; ++i) result.at[i] = lane(i);
  return result.vector();
}

// Lane i of memory where its bit is set, else of `other`.
template <class T, class Vector>
EMULATED Vector load_selected(const Vector& other, std::uint32_t mask, const void* source) {
  Lanes<T, Vector> result(other);
  for (int i = 0; i < result.kCount; ++i)
    if (mask >> i & 1) std::memcpy(&result.at[i], static_cast<const char*>(source) + i * sizeof(T), sizeof(T));
  return result.vector();
}
template <class T, class Vector>
EMULATED void store_selected(void* target, std::uint32_t mask, const Vector& vector) {
  const Lanes<T, Vector> lanes(vector);
  for (int i = 0; i < lanes.kCount; ++i)
    if (mask >> i & 1) std::memcpy(static_cast<char*>(target) + i * sizeof(T), &lanes.at[i], sizeof(T));
}
template <class Vector>
EMULATED Vector load_whole(const void* source) {
  Vector vector;
  std::memcpy(&vector, source, sizeof vector);
  return vector;
}

// -- moves

EMULATED __m512 _mm512_set1_ps(float value) { return value - __m512{}; }
EMULATED __m512i _mm512_set1_epi32(int value) { return (__m512i)(value - Ints{}); }
EMULATED __m512i _mm512_set1_epi16(short value) { return (__m512i)(value - Shorts{}); }
EMULATED __m512i _mm512_set1_epi8(char value) { return _mm512_set1_epi32(0x01010101 * static_cast<std::uint8_t>(value)); }
template <class... Values>
EMULATED __m512i _mm512_set_epi16(Values... from_last) {
  const std::int16_t values[32] = {static_cast<std::int16_t>(from_last)...};
  return each<__m512i>([&](int i) { return values[31 - i]; });
}
EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
EMULATED __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
EMULATED __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
EMULATED __m512i _mm512_castsi128_si512(__m128i a) {
  __m512i result{};
  std::memcpy(&result, &a, sizeof a);
  return result;
}
EMULATED __m256 _mm512_castps512_ps256(__m512 a) { return Halves(a).at[0]; }
EMULATED __m256 _mm512_extractf32x8_ps(__m512 a, int half) { return Halves(a).at[half]; }
EMULATED __m512 _mm512_loadu_ps(const void* source) { return load_whole<__m512>(source); }
EMULATED __m512i _mm512_loadu_si512(const void* source) { return load_whole<__m512i>(source); }
EMULATED __m512i _mm512_load_si512(const void* source) { return load_whole<__m512i>(__builtin_assume_aligned(source, 64)); }
EMULATED void _mm512_storeu_ps(void* target, __m512 a) { std::memcpy(target, &a, sizeof a); }
EMULATED void _mm512_storeu_si512(void* target, __m512i a) { std::memcpy(target, &a, sizeof a); }
EMULATED void _mm512_store_si512(void* target, __m512i a) { std::memcpy(__builtin_assume_aligned(target, 64), &a, sizeof a); }
EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* source) { return load_selected<float>(__m512{}, mask, source); }
EMULATED __m512 _mm512_mask_loadu_ps(__m512 other, __mmask16 mask, const void* source) { return load_selected<float>(other, mask, source); }
EMULATED void _mm512_mask_storeu_ps(void* target, __mmask16 mask, __m512 a) { store_selected<float>(target, mask, a); }
EMULATED __m128i _mm_maskz_loadu_epi8(__mmask16 mask, const void* source) { return load_selected<char>(__m128i{}, mask, source); }
EMULATED __m256i _mm256_maskz_loadu_epi8(__mmask32 mask, const void* source) { return load_selected<char>(__m256i{}, mask, source); }
EMULATED __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* source) { return load_selected<short>(__m256i{}, mask, source); }
EMULATED void _mm256_mask_storeu_epi16(void* target, __mmask16 mask, __m256i a) { store_selected<short>(target, mask, a); }
EMULATED __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 a) {
  const Floats x(a);
  return each<__m512>([&](int i) { return mask >> i & 1 ? x.at[i] : 0.0f; });
}
EMULATED __m512i _mm512_mask_mov_epi32(__m512i other, __mmask16 mask, __m512i a) {
  return each<__m512i>([&](int i) { return mask >> i & 1 ? ((Ints)a)[i] : ((Ints)other)[i]; });
}

// -- floats

EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
EMULATED __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
EMULATED __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const Halves x(a), y(b), z(c);
  return each<__m512>([&](int i) { return _mm256_fmadd_ps(x.at[i], y.at[i], z.at[i]); });
}
EMULATED __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(-a, b, c); }
EMULATED __m512 _mm512_abs_ps(__m512 a) { return (__m512)((Ints)a & 0x7fffffff); }
EMULATED __m512 _mm512_rcp14_ps(__m512 a) { return (__m512)((Ints)(1.0f / a) & ~0x1ff); }
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  const Floats x(a), y(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool is_set = predicate == _CMP_NLT_UQ ? !(x.at[i] < y.at[i]) : __builtin_isunordered(x.at[i], y.at[i]);
    mask |= static_cast<unsigned>(is_set) << i;
  }
  return static_cast<__mmask16>(mask);
}
EMULATED __m512 _mm512_roundscale_ps(__m512 a, int) {
  const Halves x(a);
  return each<__m512>([&](int i) { return _mm256_round_ps(x.at[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); });
}
EMULATED __m512 _mm512_reduce_ps(__m512 a, int) {
  const Floats x(a);
  return each<__m512>([&](int i) { return __builtin_isinf(x.at[i]) ? 0.0f : x.at[i] - __builtin_floorf(x.at[i]); });
}
EMULATED __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each<__m512>([&](int i) {
    const float power = __builtin_floorf(y.at[i]);  // beyond these limits nothing of a finite number is left
    return power != power ? power : __builtin_ldexpf(x.at[i], static_cast<int>(power < -300.0f ? -300.0f : power > 300.0f ? 300.0f : power));
  });
}
EMULATED __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) { return _mm512_maskz_mov_ps(mask, _mm512_scalef_ps(a, b)); }

// Lane 0 with lane 8, 1 with 9 and so on, then the same with the first half.
template <class T, class Vector, class Join>
EMULATED T reduced(const Vector& a, const Join& join) {
  Lanes<T, Vector> lanes(a);
  for (int half = lanes.kCount / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes.at[i] = join(lanes.at[i], lanes.at[i + half]);
  return lanes.at[0];
}
EMULATED float _mm512_reduce_add_ps(__m512 a) { return reduced<float>(a, [](float x, float y) { return x + y; }); }
EMULATED float _mm512_reduce_max_ps(__m512 a) { return reduced<float>(a, [](float x, float y) { return x > y ? x : y; }); }

// -- integers

EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
EMULATED __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i result{};
  for (int row = 0; row < 8; ++row)
    if (table >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  return result;
}
EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((Unsigned)a + (Unsigned)b); }
EMULATED __m512i _mm512_sub_epi32(__m512i a, __m512i b) { return (__m512i)((Unsigned)a - (Unsigned)b); }
EMULATED __m512i _mm512_mullo_epi32(__m512i a, __m512i b) { return (__m512i)((Unsigned)a * (Unsigned)b); }
EMULATED __m512i _mm512_add_epi16(__m512i a, __m512i b) { return (__m512i)((UnsignedShorts)a + (UnsignedShorts)b); }
EMULATED __m512i _mm512_slli_epi32(__m512i a, unsigned count) { return (__m512i)((Unsigned)a << count); }
EMULATED __m512i _mm512_srli_epi32(__m512i a, unsigned count) { return (__m512i)((Unsigned)a >> count); }
EMULATED __m512i _mm512_srai_epi32(__m512i a, unsigned count) { return (__m512i)((Ints)a >> static_cast<int>(count)); }
EMULATED __m512i _mm512_slli_epi16(__m512i a, unsigned count) { return (__m512i)((UnsignedShorts)a << static_cast<std::uint16_t>(count)); }
EMULATED __m512i _mm512_srli_epi16(__m512i a, unsigned count) { return (__m512i)((UnsignedShorts)a >> static_cast<std::uint16_t>(count)); }
EMULATED __mmask32 _mm512_cmplt_epu16_mask(__m512i a, __m512i b) {
  const Lanes<std::uint16_t, __m512i> x(a), y(b);
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<unsigned>(x.at[i] < y.at[i]) << i;
  return mask;
}
EMULATED int _mm512_reduce_add_epi32(__m512i a) { return reduced<int>(a, [](int x, int y) { return x + y; }); }
// Adds the products of four unsigned bytes of a and four signed ones of b to every lane.
EMULATED __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  const Lanes<std::uint8_t, __m512i> x(a);
  const Lanes<std::int8_t, __m512i> y(b);
  return each<__m512i>([&](int i) {
    int sum = ((Ints)sums)[i];
    for (int j = 4 * i; j < 4 * i + 4; ++j) sum += x.at[j] * y.at[j];
    return sum;
  });
}

// -- conversions

EMULATED __m512 _mm512_cvtepi32_ps(__m512i a) { return __builtin_convertvector((Ints)a, __m512); }
EMULATED __m512i _mm512_cvtps_epi32(__m512 a) {
  const Halves x(a);
  return each<__m512i>([&](int i) { return _mm256_cvtps_epi32(x.at[i]); });
}
EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) {
  const Lanes<std::uint16_t, __m256i> x(a);
  return each<__m512i>([&](int i) -> std::int32_t { return x.at[i]; });
}
EMULATED __m512i _mm512_cvtepi8_epi16(__m256i a) {
  const Lanes<std::int8_t, __m256i> x(a);
  return each<__m512i>([&](int i) -> std::int16_t { return x.at[i]; });
}
EMULATED __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return each<__m256i>([&](int i) { return static_cast<std::int16_t>(((Ints)a)[i]); });
}
EMULATED __m128i _mm512_cvtepi32_epi8(__m512i a) {
  return each<__m128i>([&](int i) { return static_cast<std::int8_t>(((Ints)a)[i]); });
}
EMULATED __m512 _mm512_cvtph_ps(__m256i a) {
  const Lanes<__m128i, __m256i> x(a);
  return each<__m512>([&](int i) { return _mm256_cvtph_ps(x.at[i]); });
}
EMULATED __m256i _mm512_cvtps_ph(__m512 a, int) {
  const Halves x(a);
  return each<__m256i>([&](int i) { return _mm256_cvtps_ph(x.at[i], _MM_FROUND_TO_NEAREST_INT); });
}

// -- permutations; lanes of 128 bits are shuffled each in the same way

EMULATED __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int order) {
  const Lanes<__m128, __m512> x(a), y(b);
  return each<__m512>([&](int i) { return (i < 2 ? x : y).at[order >> (2 * i) & 3]; });
}
EMULATED __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int order) {
  const Floats x(a), y(b);
  return each<__m512>([&](int i) { return (i % 4 < 2 ? x : y).at[i / 4 * 4 + (order >> (2 * (i % 4)) & 3)]; });
}
EMULATED __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each<__m512>([&](int i) { return (i % 2 == 0 ? x : y).at[i / 4 * 4 + i % 4 / 2]; });
}
EMULATED __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each<__m512>([&](int i) { return (i % 2 == 0 ? x : y).at[i / 4 * 4 + 2 + i % 4 / 2]; });
}
EMULATED __m512i _mm512_mask_permutexvar_epi16(__m512i other, __mmask32 mask, __m512i order, __m512i a) {
  return each<__m512i>([&](int i) { return mask >> i & 1 ? ((Shorts)a)[((Shorts)order)[i] & 31] : ((Shorts)other)[i]; });
}
EMULATED __m512i _mm512_permutexvar_epi16(__m512i order, __m512i a) { return _mm512_mask_permutexvar_epi16(a, ~0u, order, a); }

// -- bfloat16

EMULATED float without_subnormal(float value) { return __builtin_fabsf(value) < 0x1p-126f ? __builtin_copysignf(0.0f, value) : value; }
EMULATED std::int16_t bf16_of(float value) {
  const float normal = without_subnormal(value);
  std::uint32_t bits;
  std::memcpy(&bits, &normal, sizeof bits);
  return static_cast<std::int16_t>(value != value ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
EMULATED float float_of(std::uint32_t upper_half) {
  float value;
  std::memcpy(&value, &upper_half, sizeof value);
  return without_subnormal(value);
}
EMULATED __m256bh _mm512_cvtneps_pbh(__m512 a) {
  const Floats x(a);
  return each<__m256bh>([&](int i) { return bf16_of(x.at[i]); });
}
EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  const Floats x(low), y(high);
  return each<__m512bh>([&](int i) { return bf16_of(i < 16 ? x.at[i] : y.at[i - 16]); });
}
// Adds the products of two bfloat16 to every lane, and rounds after each: the upper pair first.
EMULATED __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  const Lanes<std::uint32_t, __m512bh> x(a), y(b);
  const Floats before(sums);
  return each<__m512>([&](int i) {
    const float upper = float_of(x.at[i] & 0xffff0000u) * float_of(y.at[i] & 0xffff0000u);
    const float lower = float_of(x.at[i] << 16) * float_of(y.at[i] << 16);
    return without_subnormal(without_subnormal(without_subnormal(before.at[i]) + upper) + lower);
  });
}
