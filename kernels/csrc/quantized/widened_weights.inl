// Quantised weights as bfloat16, scaled and rounded, in the order of packed_linear.h, so that many rows are multiplied as with those. The cost
// of widening is shared by all rows.

// Returns the least number of rows for which it is less than what products in the weights' own width lose, where every group's sums are
// scaled by themselves.
static std::int64_t widened_from([[maybe_unused]] const QuantizedCall& call) {
#if PAGED_AMX
  // The fewer groups and the more digits, the later. Groups that do not fill a tile are not multiplied in tiles.
  if (call.group_size % kTileInputs != 0) return 64;
  return call.bits == 8 ? 112 : call.group_size == 128 ? 80 : 64;
#elif PAGED_BYTE_DOT && PAGED_BF16_DOT
  return call.bits == 8 ? 96 : 64;  // two digits take as long as a bfloat16; with 4 bits groups are smaller
#elif PAGED_INTEGER_DOT
  return INT64_MAX;  // nor do floats multiply faster
#else
  return 32;  // every block of rows widens the weights by itself
#endif
}

// Returns lane i of both, rounded, side by side.
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

// Inputs that a panel has then: groups are multiples of what they are padded to.
INLINE std::int64_t widened_inputs(const QuantizedCall& call) { return (call.num_inputs + kPackedInputs - 1) / kPackedInputs * kPackedInputs; }

// A panel as [inputs / 2][16] pairs, rows of a packed panel apart.
template <int kBits>
static void widen_pairs(const QuantizedCall& call, std::int64_t panel, bf16* target) {
  constexpr int kBlockInputs = 32 / kBits;
  constexpr int kAhead = 2048;  // bytes from the weights in use to those asked for
  const std::uint8_t* weights = call.weights + panel * call.panel_bytes();
  std::int64_t at = panel * call.num_groups * kPanelOutputs;
  std::int64_t left = widened_inputs(call);
  for (std::int64_t group = 0; group < call.num_groups; ++group, at += kPanelOutputs, left -= call.group_size) {
    const auto num_blocks = static_cast<int>((left < call.group_size ? left : call.group_size) / kBlockInputs);
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

static void widen_panels(const QuantizedCall& call, RowSpan panels, bf16* target) {
  const std::int64_t pair = widened_inputs(call) * kPackedOutputs;
  for (std::int64_t panel = panels.begin; panel < panels.end; ++panel) {
    bf16* half = target + (panel - panels.begin) / 2 * pair + panel % 2 * 2 * kPanelOutputs;
    if (call.bits == 8) {
      widen_pairs<8>(call, panel, half);
    } else {
      widen_pairs<4>(call, panel, half);
    }
  }
}
