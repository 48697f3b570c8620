// Products of many bfloat16 rows on the tile matrix unit: weights are widened to bfloat16, scaled and rounded, in the order of pairs that
// `matmul` wants, a part at a time. The cost of widening is shared by all rows; nothing but the result goes to memory.

// Lane i: low[i] and high[i], rounded.
INLINE Reg pairs_of(Reg low, Reg high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
                                         17, 1, 16, 0);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
}

// Inputs [begin, begin + depth) of a panel as [depth / 2][16] pairs, rows `stride` pairs apart. Asks for the weights that are widened
// after the product of these: the panel's next ones, or the first ones of another panel.
template <int kBits>
static void widen_pairs(const QuantizedCall& call, std::int64_t panel, std::int64_t begin, int depth, float* target, int stride) {
  constexpr int kBlockInputs = 32 / kBits;
  const std::uint8_t* weights = call.weights + panel * call.panel_bytes() + begin * kPanelOutputs * kBits / 8;
  const bool is_last = begin + depth == call.padded_inputs();
  const std::uint8_t* next = is_last ? call.weights + (panel + kManyRowsPanels) * call.panel_bytes() : weights + depth * kPanelOutputs * kBits / 8;
  std::int64_t at = (panel * call.num_groups + begin / call.group_size) * kPanelOutputs;
  for (int input = 0; input < depth; at += kPanelOutputs) {
    const Reg scale = scales_at(call, at);
    const Reg shift = shifts_at<kBits>(call, at);
    for (const int end = input + call.group_size; input < end; input += kBlockInputs, weights += 64, next += 64) {
      __builtin_prefetch(next, 0, 2);
      Reg values[kBlockInputs];
      widen_block<kBits>(load_words(weights, kFlip<kBits>), values);
      if (call.zeros != nullptr)
        for (int i = 0; i < kBlockInputs; ++i) values[i] = sub(values[i], shift);
      for (int i = 0; i < kBlockInputs; i += 2, target += stride) store(target, pairs_of(mul(values[i], scale), mul(values[i + 1], scale)));
    }
  }
}

static void multiply_many_rows(const QuantizedCall& call, RowSpan span, float* scratch) {
  constexpr int kColumns = 2 * kPanelOutputs;  // multiplied together; their rows lie side by side, so that all sets of a cache serve
  float* sums = scratch;                       // [kManyRowsPanels / 2][kManyRowsBlock][kColumns]
  float* pairs = scratch + kManyRowsPanels / 2 * kManyRowsBlock * kColumns;  // [kManyRowsPanels / 2][kManyRowsDepth / 2][kColumns]
  const TileSession<true> session;
  const std::int64_t inputs = call.padded_inputs();
  const int row_words = static_cast<int>(inputs / 2);
  for (std::int64_t first = span.begin; first < span.end; first += kManyRowsPanels) {
    const int num_panels = static_cast<int>(span.end - first < kManyRowsPanels ? span.end - first : kManyRowsPanels);
    for (std::int64_t row = 0; row < call.num_rows; row += kManyRowsBlock) {
      const int rows = static_cast<int>(call.num_rows - row < kManyRowsBlock ? call.num_rows - row : kManyRowsBlock);
      for (std::int64_t begin = 0; begin < inputs; begin += kManyRowsDepth) {
        const int depth = static_cast<int>(inputs - begin < kManyRowsDepth ? inputs - begin : kManyRowsDepth);
        for (int p = 0; p < num_panels; ++p) {
          float* target = pairs + p / 2 * kManyRowsDepth / 2 * kColumns + p % 2 * kPanelOutputs;
          if (call.bits == 8) {
            widen_pairs<8>(call, first + p, begin, depth, target, kColumns);
          } else {
            widen_pairs<4>(call, first + p, begin, depth, target, kColumns);
          }
        }
        const float* x = reinterpret_cast<const float*>(call.padded_x + row * inputs + begin);
        for (int p = 0; p < num_panels; p += 2) {
          const float* b = pairs + p / 2 * kManyRowsDepth / 2 * kColumns;
          float* c = sums + p / 2 * kManyRowsBlock * kColumns;
          const Matmul m{depth / 2, x, row_words, b, kColumns, c, kColumns, begin > 0};
          matmul<true>(m, rows, p + 1 < num_panels ? kColumns : kPanelOutputs);
        }
      }
      for (int r = 0; r < rows; ++r) {
        for (int p = 0; p < num_panels; ++p) {
          const float* source = sums + (p / 2 * kManyRowsBlock + r) * kColumns + p % 2 * kPanelOutputs;
          store_panel<bf16>(call, first + p, row + r, PanelSums<1>{{{load(source)}}});
        }
      }
    }
  }
}
