// Vectors of four floats in the compiler's own vector extension: SSE2 on any x86-64, NEON on aarch64. Included inside a namespace.

#define PAGED_BF16_DOT 0
#define PAGED_BYTE_DOT 0
#define PAGED_INTEGER_DOT 0
#define PAGED_AMX 0
#define INLINE static inline __attribute__((always_inline))

typedef float Reg __attribute__((vector_size(16)));
typedef std::int32_t IntReg __attribute__((vector_size(16)));
inline constexpr int kWidth = 4;
inline constexpr int kRowBlock = 4;
inline constexpr int kWidenedRowBlock = 4;
inline constexpr int kColBlock = 2;

INLINE Reg splat(float value) { return Reg{value, value, value, value}; }
INLINE Reg load(const float* source) {
  Reg result;
  std::memcpy(&result, source, sizeof result);
  return result;
}
template <class T>
INLINE Reg load(const T* source) {
  return Reg{to_float(source[0]), to_float(source[1]), to_float(source[2]), to_float(source[3])};
}
INLINE void store(float* target, Reg value) { std::memcpy(target, &value, sizeof value); }
template <class T>
INLINE void store(T* target, Reg value) {
  for (int i = 0; i < kWidth; ++i) from_float(value[i], target[i]);
}

INLINE Reg add(Reg a, Reg b) { return a + b; }
INLINE Reg sub(Reg a, Reg b) { return a - b; }
INLINE Reg mul(Reg a, Reg b) { return a * b; }
INLINE Reg div(Reg a, Reg b) { return a / b; }
INLINE Reg fma(Reg a, Reg b, Reg c) { return a * b + c; }
// A NaN in b is kept.
INLINE Reg max(Reg a, Reg b) {
  const IntReg keep = a > b;
  return (Reg)((keep & (IntReg)a) | (~keep & (IntReg)b));
}
INLINE float sum(Reg a) { return (a[0] + a[1]) + (a[2] + a[3]); }
INLINE float maximum(Reg a) {
  const float low = a[0] > a[1] ? a[0] : a[1];
  const float high = a[2] > a[3] ? a[2] : a[3];
  return low > high ? low : high;
}
INLINE void sum4(Reg a, Reg b, Reg c, Reg d, float* target) {
  target[0] = sum(a);
  target[1] = sum(b);
  target[2] = sum(c);
  target[3] = sum(d);
}
INLINE void transpose(Reg* rows) {
  Reg columns[kWidth];
  for (int i = 0; i < kWidth; ++i) columns[i] = Reg{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
  for (int i = 0; i < kWidth; ++i) rows[i] = columns[i];
}
// 2^n for whole n in [-126, 127].
INLINE Reg power_of_two(Reg n) { return (Reg)((__builtin_convertvector(n, IntReg) + 127) << 23); }
INLINE Reg round_to_whole(Reg a) {
  const Reg magic = splat(0x1.8p23f);
  return (a + magic) - magic;
}
INLINE Reg zero_below(Reg a, float limit, Reg value) {
  const IntReg below = a < splat(limit);
  return (Reg)(~below & (IntReg)value);
}

using Words = IntReg;
INLINE Words load_words(const std::uint8_t* source, std::uint32_t flip) {
  Words words;
  std::memcpy(&words, source, sizeof words);
  return words ^ static_cast<std::int32_t>(flip);
}
INLINE Words splat_words(const std::uint8_t* source) {
  std::int32_t word;
  std::memcpy(&word, source, sizeof word);
  return Words{word, word, word, word};
}
// The bfloat16 in the lower or the upper half of every word.
INLINE Reg low_halves(Words words) { return (Reg)(words << 16); }
INLINE Reg high_halves(Words words) { return (Reg)(words & static_cast<std::int32_t>(0xffff0000u)); }
// A signed bit field of every word, as a float: shifted up until its sign is the word's, then down.
template <int kUp, int kDown>
INLINE Reg field(Words words) {
  return __builtin_convertvector((words << kUp) >> kDown, Reg);
}

#include "simd/partial.inl"

// Lane i: the first `count` pairs of low[i] and high[i], then zeros.
INLINE Reg interleave(const bf16* low, const bf16* high, int count) { return interleave_n(low, high, count); }
