// Products in integers: x as two signed digits of 8 bits (x = scale * (256 * high + low)), weights as they are stored, unsigned. Exact
// until a group's sum is scaled: |sum| < 2^15 * 2^8 * 128 inputs fits 32 bits, and so does what zeros take off.

inline constexpr float kLargestWhole = 32639.0f;  // 127 * 256 + 127

#if PAGED_AMX
inline constexpr std::int64_t kMinTileRows = 4;  // fewer are faster without a matrix unit
inline constexpr int kTileInputs = 64;           // a row of a tile of digits
inline constexpr int kTileBytes = kTileInputs * kTileSize;

INLINE bool in_tiles(const QuantizedCall& call) { return call.num_rows >= kMinTileRows && call.group_size % kTileInputs == 0; }
#endif

// The place of a row's digits: `first` for its first input, and `step` to every 64 inputs that follow. In tiles they are
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

// Stores a group of x as digits; returns their sum.
template <class T>
static std::int32_t prepare_whole(const QuantizedCall& call, const T* x, int count, float inverse, std::int64_t row, std::int64_t group) {
  const DigitsOfRow digits_of = digits_of_row(call, row);
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < call.group_size; i += kWidth) {
    const __m512i digits = inverse == 0.0f ? _mm512_setzero_si512() : _mm512_cvtps_epi32(mul(load_padded(x + i, count - i), splat(inverse)));
    const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(digits, 24), 24);
    const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(digits, low), 8);
    const std::int64_t input = group * call.group_size + i;
    const std::int64_t at = digits_of.first + input / 64 * digits_of.step + input % 64;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(call.high + at), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(call.low + at), _mm512_cvtepi32_epi8(low));
    total = _mm512_add_epi32(total, digits);
  }
  return _mm512_reduce_add_epi32(total);
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

// Bytes from the weights in use to those asked for. The processor's own prefetching ends at every page, this does not. Memory's latency
// is up to a page of codes: a few cycles are enough for a line of them.
inline constexpr int kDigitsAhead = 4096;
// The cache they are asked into, as prefetches number them. On the processors with a matrix unit that were measured, the second one is
// faster for a single row.
inline constexpr int kDigitsCache = PAGED_AMX ? 2 : 3;
// Rows that share each weight that is loaded; two panels share each digit that is. More sums than these do not fit the registers.
inline constexpr int kMostDigitRows = 4;

// A block of rows, of several that go by a pair of panels.
struct DigitBlock {
  std::int64_t row;
  std::int64_t index;
  std::int64_t count;
};

// kQuads quads (of 64 bytes, or with 4 bits of 32) of each panel at a time. A dot product takes several cycles: where rows and panels are
// few, their sums are in kChains parts.
template <class T, int kBits, int kRows, int kPanels, int kQuads, int kChains>
static void multiply_quads(const QuantizedCall& call, std::int64_t panel, DigitBlock block) {
  const std::int64_t row = block.row;
  constexpr int kStepBytes = kQuads * 8 * kBits;
  static_assert(kStepBytes % 64 == 0);
  const std::int64_t stride = call.padded_inputs();
  const std::int64_t panel_bytes = call.panel_bytes();
  const std::uint8_t* weights = call.weights + panel * panel_bytes;
  const std::int8_t* high_digits = call.high + row * stride;
  const std::int8_t* low_digits = call.low + row * stride;
  const __m512i nibble = _mm512_set1_epi8(15);
  PanelSums<kRows> totals[kPanels];
  for (int p = 0; p < kPanels; ++p)
    for (int r = 0; r < kRows; ++r) totals[p].values[r][0] = splat(0.0f);
  std::int64_t left = panel_bytes;
  for (std::int64_t group = 0; group < call.num_groups; ++group) {
    __m512i high[kPanels][kRows][kChains];
    __m512i low[kPanels][kRows][kChains];
    for (int p = 0; p < kPanels; ++p)
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kChains; ++c) high[p][r][c] = low[p][r][c] = _mm512_setzero_si512();
    // The first two of several blocks prefetch a panel each of the next pair, so that memory has all their time.
    std::int64_t ahead[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      // Behind a panel's end lies the other one, which is in the cache already.
      ahead[p] = kDigitsAhead + (left <= kDigitsAhead ? (kPanels - 1) * panel_bytes : 0);
      if (kPanels == 2 && block.count > 1) ahead[p] = block.index == p ? 2 * panel_bytes : 0;
    }
    for (int input = 0; input < call.group_size; input += 4 * kQuads, weights += kStepBytes) {
      __m512i quads[kPanels][kQuads];
      for (int p = 0; p < kPanels; ++p) {
        const std::uint8_t* lines = weights + p * panel_bytes;
        for (int q = 0; q < kQuads; q += 8 / kBits, lines += 64) {
          __builtin_prefetch(lines + ahead[p], 0, kRows == kMostDigitRows ? 2 : kDigitsCache);
          const __m512i line = _mm512_loadu_si512(lines);
          if constexpr (kBits == 8) {
            quads[p][q] = line;
          } else {
            quads[p][q] = _mm512_and_si512(line, nibble);
            quads[p][q + 1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble);
          }
        }
      }
      for (int q = 0; q < kQuads; ++q) {
        const int c = q % kChains;
        for (int r = 0; r < kRows; ++r) {
          const __m512i high_quad = quad_of(high_digits + r * stride + 4 * q), low_quad = quad_of(low_digits + r * stride + 4 * q);
          for (int p = 0; p < kPanels; ++p) high[p][r][c] = _mm512_dpbusd_epi32(high[p][r][c], quads[p][q], high_quad);
          for (int p = 0; p < kPanels; ++p) low[p][r][c] = _mm512_dpbusd_epi32(low[p][r][c], quads[p][q], low_quad);
        }
      }
      high_digits += 4 * kQuads;
      low_digits += 4 * kQuads;
    }
    left -= call.group_size * kBits / 8 * kPanelOutputs;
    for (int p = 0; p < kPanels; ++p) {
      const GroupScales scales = group_scales(call, ((panel + p) * call.num_groups + group) * kPanelOutputs);
      for (int r = 0; r < kRows; ++r) {
        for (int c = 1; c < kChains; ++c) {
          high[p][r][0] = _mm512_add_epi32(high[p][r][0], high[p][r][c]);
          low[p][r][0] = _mm512_add_epi32(low[p][r][0], low[p][r][c]);
        }
        const std::int64_t slot = (row + r) * call.num_groups + group;
        totals[p].values[r][0] = add_scaled(call, slot, scales, high[p][r][0], low[p][r][0], totals[p].values[r][0]);
      }
    }
  }
  for (int p = 0; p < kPanels; ++p) store_panel<T>(call, panel + p, row, totals[p]);
}

// A single row has memory to wait for, and reads it in order; more have two panels at a time.
template <class T, int kBits, int kPanels, int kRows = kMostDigitRows>
static void multiply_digit_block(const QuantizedCall& call, std::int64_t panel, DigitBlock block, std::int64_t num_rows) {
  if (num_rows < kRows) {
    if constexpr (kRows > 1) multiply_digit_block<T, kBits, kPanels, kRows - 1>(call, panel, block, num_rows);
  } else if constexpr (kRows == 1) {
    for (int p = 0; p < kPanels; ++p) multiply_quads<T, kBits, 1, 1, 4, 4>(call, panel + p, block);
  } else {
    multiply_quads<T, kBits, kRows, kPanels, 2, (kRows * kPanels <= 4 ? 2 : 1)>(call, panel, block);
  }
}

// All rows with kPanels panels, in blocks of nearly the same size.
template <class T, int kBits, int kPanels>
static void multiply_digits_panels(const QuantizedCall& call, std::int64_t panel) {
  const std::int64_t num_blocks = (call.num_rows + kMostDigitRows - 1) / kMostDigitRows;
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const std::int64_t row = call.num_rows * block / num_blocks, end = call.num_rows * (block + 1) / num_blocks;
    multiply_digit_block<T, kBits, kPanels>(call, panel, {row, block, num_blocks}, end - row);
  }
}

#if PAGED_AMX
#include "quantized/quantized_amx.inl"
#endif

template <class T, int kBits>
static void multiply_integers(const QuantizedCall& call, RowSpan span) {
#if PAGED_AMX
  if (in_tiles(call)) return multiply_tiles<T, kBits>(call, span);
#endif
  std::int64_t panel = span.begin;
  for (; panel + 1 < span.end; panel += 2) multiply_digits_panels<T, kBits, 2>(call, panel);
  if (panel < span.end) multiply_digits_panels<T, kBits, 1>(call, panel);
}
