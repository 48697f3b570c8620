// Products in integers where only pairs of 16 bits have a dot product (vpmaddwd): x as whole numbers of 16 bits, weights as they are stored,
// unsigned, widened to 16 bits as they are loaded. Exact until a group's sum is scaled: |sum| < 2^15 * 2^8 * 128 inputs fits 32 bits, and so
// does what zeros take off.

inline constexpr float kLargestWhole = 32767.0f;

// Of each four inputs x 0 and x 2, then x 1 and x 3: as masking and shifting leave the bytes of a quad of weights.
INLINE void store_word_quads(std::int16_t* target, __m256i values) {
  const __m128i words = _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packs_epi32(values, values), 0x08));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm_shufflehi_epi16(_mm_shufflelo_epi16(words, 0xd8), 0xd8));
}

INLINE std::int32_t sum_words(__m256i values) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

// Stores a group of x as words; returns their sum.
template <class T>
static std::int32_t prepare_whole(const QuantizedCall& call, const T* x, int count, float inverse, std::int64_t row, std::int64_t group) {
  std::int16_t* words = call.words + row * call.padded_inputs() + group * call.group_size;
  __m256i total = _mm256_setzero_si256();
  for (int i = 0; i < call.group_size; i += kWidth) {
    const __m256i whole = inverse == 0.0f ? _mm256_setzero_si256() : _mm256_cvtps_epi32(mul(load_padded(x + i, count - i), splat(inverse)));
    store_word_quads(words + i, whole);
    total = _mm256_add_epi32(total, whole);
  }
  return sum_words(total);
}

INLINE __m256i splat_pair(const std::int16_t* source) {
  std::int32_t pair;
  std::memcpy(&pair, source, sizeof pair);
  return _mm256_set1_epi32(pair);
}

// Keeps an addition where it is written: GCC 12 would add up the products of all pairs of a quad first, which takes so many registers that
// sums go through memory in every turn.
INLINE void settle(__m256i& sum) { asm("" : "+x"(sum)); }

// Adds the products of a pair of each quad: lanes of `weights` are the bytes or nibbles of both inputs, widened.
template <int kRows>
INLINE void add_words(__m256i (&sums)[kRows][kPanelRegs], const __m256i (&weights)[kPanelRegs], const std::int16_t* x, std::int64_t stride) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const __m256i pair = splat_pair(x + r * stride);
    for (int j = 0; j < kPanelRegs; ++j) {
      sums[r][j] = _mm256_add_epi32(sums[r][j], _mm256_madd_epi16(weights[j], pair));
      settle(sums[r][j]);
    }
  }
}

// Bytes from the weights in use to those asked for. The processor's own prefetching ends at every page, this does not.
inline constexpr int kWordsAhead = 2048;
// Rows that share each weight that is widened. More sums than these do not fit the registers.
inline constexpr int kMostWordRows = 6;

template <class T, int kBits, int kRows>
static void multiply_words_block(const QuantizedCall& call, std::int64_t panel, std::int64_t row) {
  constexpr int kBlockInputs = 32 / kBits;
  const std::int64_t stride = call.padded_inputs();
  const std::uint8_t* weights = call.weights + panel * call.panel_bytes();
  const std::int16_t* x = call.words + row * stride;
  const __m256i low = _mm256_set1_epi16(kBits == 8 ? 0xff : 0xf);
  PanelSums<kRows> totals;
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kPanelRegs; ++j) totals.values[r][j] = splat(0.0f);
  for (std::int64_t group = 0; group < call.num_groups; ++group) {
    __m256i sums[kRows][kPanelRegs];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < kPanelRegs; ++j) sums[r][j] = _mm256_setzero_si256();
    for (int input = 0; input < call.group_size; input += kBlockInputs, weights += 4 * kPanelOutputs, x += kBlockInputs) {
      __builtin_prefetch(weights + kWordsAhead);
      __m256i words[kPanelRegs], part[kPanelRegs];
      for (int j = 0; j < kPanelRegs; ++j) words[j] = load_words(weights + j * 4 * kWidth, 0);
      for (int j = 0; j < kPanelRegs; ++j) part[j] = _mm256_and_si256(words[j], low);
      add_words<kRows>(sums, part, x, stride);
      if constexpr (kBits == 8) {
        for (int j = 0; j < kPanelRegs; ++j) part[j] = _mm256_srli_epi16(words[j], 8);
        add_words<kRows>(sums, part, x + 2, stride);
      } else {
        for (int j = 0; j < kPanelRegs; ++j) part[j] = _mm256_and_si256(_mm256_srli_epi16(words[j], 8), low);
        add_words<kRows>(sums, part, x + 2, stride);
        for (int j = 0; j < kPanelRegs; ++j) part[j] = _mm256_and_si256(_mm256_srli_epi16(words[j], 4), low);
        add_words<kRows>(sums, part, x + 4, stride);
        for (int j = 0; j < kPanelRegs; ++j) part[j] = _mm256_srli_epi16(words[j], 12);
        add_words<kRows>(sums, part, x + 6, stride);
      }
    }
    for (int j = 0; j < kPanelRegs; ++j) {
      const std::int64_t at = (panel * call.num_groups + group) * kPanelOutputs + j * kWidth;
      const Reg scale = scales_at(call, at);
      const __m256i zeros = call.zeros == nullptr ? _mm256_set1_epi32(1) : _mm256_cvtps_epi32(load(call.zeros + at));
      for (int r = 0; r < kRows; ++r) {
        const std::int64_t slot = (row + r) * call.num_groups + group;
        const __m256i offset = _mm256_mullo_epi32(_mm256_set1_epi32(call.offsets[slot]), zeros);
        const Reg product = _mm256_cvtepi32_ps(_mm256_sub_epi32(sums[r][j], offset));
        totals.values[r][j] = fma(product, mul(scale, splat(call.input_scales[slot])), totals.values[r][j]);
      }
    }
  }
  store_panel<T>(call, panel, row, totals);
}

template <class T, int kBits, int kRows = kMostWordRows>
static void multiply_words_rows(const QuantizedCall& call, std::int64_t panel, std::int64_t row, std::int64_t num_rows) {
  if (num_rows == kRows) {
    multiply_words_block<T, kBits, kRows>(call, panel, row);
  } else if constexpr (kRows > 1) {
    multiply_words_rows<T, kBits, kRows - 1>(call, panel, row, num_rows);
  }
}

// All rows, in blocks of nearly the same size.
template <class T, int kBits>
static void multiply_integers(const QuantizedCall& call, RowSpan span) {
  const std::int64_t num_blocks = (call.num_rows + kMostWordRows - 1) / kMostWordRows;
  for (std::int64_t panel = span.begin; panel < span.end; ++panel) {
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      const std::int64_t row = call.num_rows * block / num_blocks;
      multiply_words_rows<T, kBits>(call, panel, row, call.num_rows * (block + 1) / num_blocks - row);
    }
  }
}
