// Blocks of many rows where pairs of bfloat16 have no product of their own: rows come as floats (`PackedCall::wide`), and what is left to
// widen, a pair of vectors of weights, is shared by all rows of the block.

inline constexpr int kWideRegs = 2;
inline constexpr int kPartPasses = kPackedRegs / kWideRegs;  // of a block through a panel's part
inline constexpr int kManyRowsBlock = kPackedRegs == 2 ? 12 : 6;

INLINE Reg splat_float(const std::uint8_t* source) {
  float value;
  std::memcpy(&value, source, sizeof value);
  return splat(value);
}

// kRows rows with kWideRegs vectors of a panel's outputs. Of each pair the first input, then the other: the order of `add_pairs`. Not
// inlined: among two passes GCC 12 finds too few registers for the sums.
template <int kRows>
__attribute__((noinline)) static void multiply_wide_rows(const float* x, std::int64_t x_stride, const std::uint8_t* weights,
                                                         std::int64_t steps, const float* from, float* to, AskAhead ask) {
  const RowPointers<kRows> rows(x, x_stride);
  Reg sums[kRows][kWideRegs];
  // Unrolled, so that sums stay in registers: GCC 12 would store all of them in every turn of the products.
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kWideRegs; ++j) sums[r][j] = from == nullptr ? splat(0.0f) : load(from + r * kPackedOutputs + j * kWidth);
  std::int64_t at = 0;  // bytes of a row
  for (std::int64_t step = 0; step < steps; ++step) {
    ask.step();
#pragma GCC unroll 2
    for (int pair = 0; pair < kPackedInputs / 2; ++pair, at += 8, weights += 4 * kPackedOutputs) {
      const Reg low[kWideRegs] = {low_halves(load_words(weights, 0)), low_halves(load_words(weights + 4 * kWidth, 0))};
      for (int r = 0; r < kRows; ++r) {
        const Reg value = splat_float(rows[r] + at);
        for (int j = 0; j < kWideRegs; ++j) sums[r][j] = fma(value, low[j], sums[r][j]);
      }
      const Reg high[kWideRegs] = {high_halves(load_words(weights, 0)), high_halves(load_words(weights + 4 * kWidth, 0))};
      for (int r = 0; r < kRows; ++r) {
        const Reg value = splat_float(rows[r] + at + 4);
        for (int j = 0; j < kWideRegs; ++j) sums[r][j] = fma(value, high[j], sums[r][j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kWideRegs; ++j) store(to + r * kPackedOutputs + j * kWidth, sums[r][j]);
}

template <int kRows = kManyRowsBlock>
static void multiply_wide_block(std::int64_t num_rows, const float* x, std::int64_t x_stride, const std::uint8_t* weights,
                                std::int64_t steps, const float* from, float* to, AskAhead ask) {
  if (num_rows == kRows) {
    for (int at = 0; at < kPackedOutputs; at += kWideRegs * kWidth) {
      multiply_wide_rows<kRows>(x, x_stride, weights + 4 * at, steps, from == nullptr ? nullptr : from + at, to + at, ask);
      ask.ahead += steps * ask.lines * 64;
    }
  } else if constexpr (kRows > 1) {
    multiply_wide_block<kRows - 1>(num_rows, x, x_stride, weights, steps, from, to, ask);
  }
}

// Rows `rows` of x with `steps` times 32 inputs of a panel, added to `from` (null: to zeros).
static void multiply_block(const PackedCall& call, RowSpan rows, std::int64_t input, const std::uint8_t* weights, std::int64_t steps,
                           const float* from, float* to, const AskAhead& ask) {
  const std::int64_t stride = call.padded_inputs();
  const float* x = call.wide + rows.begin * stride + input;
  multiply_wide_block(rows.end - rows.begin, x, stride, weights, steps, from, to, ask);
}
