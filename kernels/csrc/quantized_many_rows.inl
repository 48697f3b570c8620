// Products of many bfloat16 rows with quantised weights: these are widened to bfloat16, scaled and rounded, in the order of packed_linear.h,
// some panels at a time, and multiplied as those are while they are in the cache. The cost of widening is shared by all rows; nothing but
// the result goes to memory.

// Lane i of both, rounded, side by side.
INLINE void store_pairs(bf16* target, Reg low, Reg high) {
#if PAGED_BF16_DOT
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
                                         17, 1, 16, 0);
  _mm512_storeu_si512(target, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
#else
  bf16 rounded[2][kWidth];
  store(rounded[0], low);
  store(rounded[1], high);
  for (int lane = 0; lane < kWidth; ++lane, target += 2) {
    target[0] = rounded[0][lane];
    target[1] = rounded[1][lane];
  }
#endif
}

// A panel as [inputs / 2][16] pairs, rows of a packed panel apart.
template <int kBits>
static void widen_pairs(const QuantizedCall& call, std::int64_t panel, bf16* target) {
  constexpr int kBlockInputs = 32 / kBits;
  constexpr int kAhead = 2048;  // bytes from the weights in use to those asked for
  const std::uint8_t* weights = call.weights + panel * call.panel_bytes();
  std::int64_t at = panel * call.num_groups * kPanelOutputs;
  const int num_blocks = call.group_size / kBlockInputs;
  for (std::int64_t group = 0; group < call.num_groups; ++group, at += kPanelOutputs) {
    for (int j = 0; j < kPanelRegs; ++j) {
      const Reg scale = scales_at(call, at + j * kWidth);
      const Reg shift = shifts_at<kBits>(call, at + j * kWidth);
      for (int block = 0; block < num_blocks; ++block) {
        const std::uint8_t* words = weights + block * 4 * kPanelOutputs + j * 4 * kWidth;
        __builtin_prefetch(words + kAhead);
        Reg values[kBlockInputs];
        widen_block<kBits>(load_words(words, kFlip<kBits>), values);
        if (call.zeros != nullptr)
          for (int i = 0; i < kBlockInputs; ++i) values[i] = sub(values[i], shift);
        bf16* pairs = target + block * kBlockInputs * kPackedOutputs + j * 2 * kWidth;
        for (int i = 0; i < kBlockInputs; i += 2, pairs += 2 * kPackedOutputs) store_pairs(pairs, mul(values[i], scale), mul(values[i + 1], scale));
      }
    }
    weights += num_blocks * 4 * kPanelOutputs;
    target += call.group_size * kPackedOutputs;
  }
}

static void multiply_many_rows(const QuantizedCall& call, RowSpan span, float* scratch) {
  const std::int64_t inputs = call.padded_inputs();
  bf16* widened = reinterpret_cast<bf16*>(scratch);
  for (std::int64_t panel = span.begin; panel < span.end; ++panel) {
    bf16* target = widened + (panel - span.begin) / 2 * inputs * kPackedOutputs + panel % 2 * 2 * kPanelOutputs;
    if (call.bits == 8) {
      widen_pairs<8>(call, panel, target);
    } else {
      widen_pairs<4>(call, panel, target);
    }
  }
  const RowSpan packed{span.begin / 2, (span.end + 1) / 2};
  PackedCall product{};
  // As if all panels were there: `packed` are, from the scratch memory's begin.
  product.packed = widened - packed.begin * inputs * kPackedOutputs;
  product.num_outputs = call.num_outputs;
  product.num_inputs = product.x_stride = inputs;
  product.num_rows = call.num_rows;
  product.x = call.padded_x;
#if PAGED_AMX
  product.last_rows = call.padded_x + call.num_rows / kTileSize * kTileSize * inputs;
#endif
  product.bias = static_cast<const bf16*>(call.bias);
  product.out = static_cast<bf16*>(call.out);
  for (std::int64_t row = 0; row < call.num_rows; row += kManyRowsBlock) {
    const RowSpan rows{row, call.num_rows - row < kManyRowsBlock ? call.num_rows : row + kManyRowsBlock};
    multiply_packed_many(product, rows, packed, packed.end - packed.begin, scratch + widened_floats(call));
  }
}
