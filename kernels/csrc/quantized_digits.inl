// Products in integers: x as two signed digits of 8 bits (x = scale * (256 * high + low)), weights as they are stored, unsigned. Exact
// until a group's sum is scaled: |sum| < 2^15 * 2^8 * 128 inputs fits 32 bits, and so does what zeros take off.

inline constexpr float kLargestDigits = 32639.0f;  // 127 * 256 + 127

#if PAGED_AMX
inline constexpr std::int64_t kMinTileRows = 4;  // fewer are faster without a matrix unit
inline constexpr int kTileInputs = 64;           // a row of a tile of digits
inline constexpr int kTileBytes = kTileInputs * kTileSize;

INLINE bool in_tiles(const QuantizedCall& call) { return call.num_rows >= kMinTileRows && call.group_size % kTileInputs == 0; }
#endif

// Where the digits of a row's inputs lie: those of the first one, and of every 64 that follow. In tiles they are
// [num_rows / 16, rounded up][inputs / 64][16][64].
struct DigitsOfRow {
  std::int64_t first;
  std::int64_t step;
};

INLINE DigitsOfRow digits_of_row(const QuantizedCall& call, std::int64_t row) {
#if PAGED_AMX
  if (in_tiles(call)) return {row / kTileSize * kTileSize * call.padded_inputs() + row % kTileSize * kTileInputs, kTileBytes};
#endif
  return {row * call.padded_inputs(), 64};
}

template <class T>
static void prepare_group(const QuantizedCall& call, const T* x, int count, std::int64_t row, std::int64_t group) {
  Reg largest = splat(0.0f);
  Reg nan = splat(0.0f);
  for (int i = 0; i < count; i += kWidth) {
    const Reg value = count - i < kWidth ? load_n(x + i, count - i) : load(x + i);
    largest = max(largest, _mm512_abs_ps(value));
    nan = fma(value, splat(0.0f), nan);  // NaN for infinities and NaNs
  }
  const float limit = maximum(largest);
  const float poison = sum(nan);
  constexpr float kSmallest = 1e-30f;  // below it the inverse would not be finite
  const bool usable = limit > kSmallest && poison == 0.0f;
  const Reg inverse = splat(usable ? kLargestDigits / limit : 0.0f);
  const DigitsOfRow digits_of = digits_of_row(call, row);
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < call.group_size; i += kWidth) {
    const int left = count - i;
    const Reg value = left >= kWidth ? load(x + i) : left > 0 ? load_n(x + i, left) : splat(0.0f);
    const __m512i digits = usable ? _mm512_cvtps_epi32(mul(value, inverse)) : _mm512_setzero_si512();
    const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(digits, 24), 24);
    const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(digits, low), 8);
    const std::int64_t input = group * call.group_size + i;
    const std::int64_t at = digits_of.first + input / 64 * digits_of.step + input % 64;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(call.high + at), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(call.low + at), _mm512_cvtepi32_epi8(low));
    total = _mm512_add_epi32(total, digits);
  }
  const std::int64_t slot = row * call.num_groups + group;
  call.input_scales[slot] = poison != poison ? poison : usable ? limit / kLargestDigits : 0.0f;
  call.offsets[slot] = _mm512_reduce_add_epi32(total) * (call.zeros != nullptr ? 1 : call.bits == 8 ? 128 : 8);
}

template <class T>
static void prepare_digits(const QuantizedCall& call, const T* x, std::int64_t row) {
  for (std::int64_t group = 0; group < call.num_groups; ++group) {
    const std::int64_t begin = group * call.group_size;
    const std::int64_t left = call.num_inputs - begin;
    prepare_group(call, x + begin, left < call.group_size ? static_cast<int>(left) : call.group_size, row, group);
  }
}

// A group of a panel's weights: `zeros` are read only where the call has them.
struct GroupScales {
  Reg scales;
  __m512i zeros;
};

INLINE GroupScales group_scales(const QuantizedCall& call, std::int64_t at) {
  return {scales_at(call, at), call.zeros == nullptr ? _mm512_setzero_si512() : _mm512_cvtps_epi32(load(call.zeros + at))};
}

// totals + scale of the weights * scale of the input * (256 * high + low - offset)
INLINE Reg add_scaled(const QuantizedCall& call, std::int64_t slot, const GroupScales& group, __m512i high, __m512i low, Reg totals) {
  __m512i offset = _mm512_set1_epi32(call.offsets[slot]);
  if (call.zeros != nullptr) offset = _mm512_mullo_epi32(offset, group.zeros);
  const __m512i product = _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low), offset);
  return fma(_mm512_cvtepi32_ps(product), mul(group.scales, splat(call.input_scales[slot])), totals);
}

INLINE __m512i quad_of(const std::int8_t* digits) {
  std::int32_t quad;
  std::memcpy(&quad, digits, sizeof quad);
  return _mm512_set1_epi32(quad);
}

// Bytes from the weights in use to those asked for. The processor's own prefetching ends at every page, this does not.
inline constexpr int kDigitsAhead = 1024;

// kQuads quads (of 64 bytes, or with 4 bits of 32) at a time, each with sums of its own: a dot product takes several cycles.
template <int kBits, int kRows, int kQuads>
static PanelSums<kRows> multiply_quads(const QuantizedCall& call, std::int64_t panel, std::int64_t row) {
  const std::int64_t stride = call.padded_inputs();
  const std::uint8_t* weights = call.weights + panel * call.panel_bytes();
  std::int64_t at = panel * call.num_groups * kPanelOutputs;
  const std::int8_t* high_digits = call.high + row * stride;
  const std::int8_t* low_digits = call.low + row * stride;
  const __m512i nibble = _mm512_set1_epi8(15);
  PanelSums<kRows> totals;
  for (int r = 0; r < kRows; ++r) totals.values[r][0] = splat(0.0f);
  for (std::int64_t group = 0; group < call.num_groups; ++group, at += kPanelOutputs) {
    __m512i high[kRows][kQuads];
    __m512i low[kRows][kQuads];
    for (int r = 0; r < kRows; ++r)
      for (int q = 0; q < kQuads; ++q) high[r][q] = low[r][q] = _mm512_setzero_si512();
    for (int input = 0; input < call.group_size; input += 4 * kQuads) {
      __m512i quads[kQuads];
      for (int q = 0; q < kQuads; ++q) {
        if constexpr (kBits == 8) {
          __builtin_prefetch(weights + kDigitsAhead);
          quads[q] = _mm512_loadu_si512(weights);
          weights += 64;
        } else if (q % 2 == 0) {
          __builtin_prefetch(weights + kDigitsAhead);
          const __m512i pair = _mm512_loadu_si512(weights);
          weights += 64;
          quads[q] = _mm512_and_si512(pair, nibble);
          quads[q + 1] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), nibble);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int q = 0; q < kQuads; ++q) {
          high[r][q] = _mm512_dpbusd_epi32(high[r][q], quads[q], quad_of(high_digits + r * stride + 4 * q));
          low[r][q] = _mm512_dpbusd_epi32(low[r][q], quads[q], quad_of(low_digits + r * stride + 4 * q));
        }
      }
      high_digits += 4 * kQuads;
      low_digits += 4 * kQuads;
    }
    const GroupScales scales = group_scales(call, at);
    for (int r = 0; r < kRows; ++r) {
      for (int q = 1; q < kQuads; ++q) {
        high[r][0] = _mm512_add_epi32(high[r][0], high[r][q]);
        low[r][0] = _mm512_add_epi32(low[r][0], low[r][q]);
      }
      const std::int64_t slot = (row + r) * call.num_groups + group;
      totals.values[r][0] = add_scaled(call, slot, scales, high[r][0], low[r][0], totals.values[r][0]);
    }
  }
  return totals;
}

template <class T, int kBits>
static void multiply_digits_panel(const QuantizedCall& call, std::int64_t panel) {
  std::int64_t row = 0;
  for (; row + 4 <= call.num_rows; row += 4) store_panel<T>(call, panel, row, multiply_quads<kBits, 4, 2>(call, panel, row));
  switch (call.num_rows - row) {
    case 3: return store_panel<T>(call, panel, row, multiply_quads<kBits, 3, 2>(call, panel, row));
    case 2: return store_panel<T>(call, panel, row, multiply_quads<kBits, 2, 2>(call, panel, row));
    case 1: return store_panel<T>(call, panel, row, multiply_quads<kBits, 1, 4>(call, panel, row));
    default: return;
  }
}

#if PAGED_AMX
#include "quantized_amx.inl"
#endif

template <class T, int kBits>
static void multiply_digits(const QuantizedCall& call, RowSpan span) {
#if PAGED_AMX
  if (in_tiles(call)) return multiply_tiles<T, kBits>(call, span);
#endif
  for (std::int64_t panel = span.begin; panel < span.end; ++panel) multiply_digits_panel<T, kBits>(call, panel);
}
