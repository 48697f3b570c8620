// A part of a product of many bfloat16 rows (packed_many_rows.inl) in vector registers: twelve rows with a panel at a time, whose sums
// fill twenty-four.

// Rows are multiplied in blocks of nearly the same size: one of few rows would have too few sums to hide the latency of each.
struct RowBlocks {
  static constexpr std::int64_t kMostRows = 12;

  std::int64_t num_rows;

  std::int64_t count() const { return (num_rows + kMostRows - 1) / kMostRows; }
  std::int64_t first(std::int64_t block) const { return num_rows * block / count(); }
};

// Row r of `rows` is rows[r / 3] + r % 3 * stride: few registers hold the addresses of all.
struct RowPointers {
  const std::uint8_t* rows[(RowBlocks::kMostRows + 2) / 3];
  std::int64_t stride;

  RowPointers(const bf16* first, std::int64_t elements_apart) : stride(elements_apart * 2) {
    const auto* row = reinterpret_cast<const std::uint8_t*>(first);
    for (auto& third : rows) {
      third = row;
      row += 3 * stride;
    }
  }
  const std::uint8_t* operator[](int row) const { return rows[row / 3] + row % 3 * stride; }
};

// kRows rows of x with `steps` times 32 inputs of a panel, added to `from` (null: to zeros).
template <int kRows>
static void multiply_packed_rows_part(const bf16* x, std::int64_t x_stride, const std::uint8_t* weights, std::int64_t steps, const float* from,
                                      float* to, BesideProducts beside) {
  const RowPointers rows(x, x_stride);
  Reg sums[kRows][2];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < 2; ++j) sums[r][j] = from == nullptr ? splat(0.0f) : load(from + r * kPackedOutputs + j * kWidth);
  std::int64_t at = 0;  // bytes of a row
  for (std::int64_t step = 0; step < steps; ++step) {
    for (int line = 0; line < beside.lines; ++line, beside.ahead += 64) {
      for (int place = 0; place < 4; ++place) __builtin_prefetch(beside.ahead + place * beside.quarter, 0, 2);
    }
#pragma GCC unroll 4
    for (int pair = 0; pair < kPackedInputs / 2; ++pair, at += 4, weights += 4 * kPackedOutputs) {
      const Words low = load_words(weights, 0), high = load_words(weights + 64, 0);
      for (int r = 0; r < kRows; ++r) {
        const Words inputs = splat_words(rows[r] + at);
        sums[r][0] = add_pairs(sums[r][0], inputs, low);
        sums[r][1] = add_pairs(sums[r][1], inputs, high);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < 2; ++j) store(to + r * kPackedOutputs + j * kWidth, sums[r][j]);
}

static void multiply_packed_part(const PackedCall& call, RowSpan rows, std::int64_t input, const std::uint8_t* weights, std::int64_t steps,
                                 const float* from, float* to, BesideProducts beside) {
  beside.pending->advance(static_cast<int>(steps) * beside.rows);  // not among the products, which have all registers
  const bf16* x = call.x + rows.begin * call.x_stride + input;
  switch (rows.end - rows.begin) {
    case 12: return multiply_packed_rows_part<12>(x, call.x_stride, weights, steps, from, to, beside);
    case 11: return multiply_packed_rows_part<11>(x, call.x_stride, weights, steps, from, to, beside);
    case 10: return multiply_packed_rows_part<10>(x, call.x_stride, weights, steps, from, to, beside);
    case 9: return multiply_packed_rows_part<9>(x, call.x_stride, weights, steps, from, to, beside);
    case 8: return multiply_packed_rows_part<8>(x, call.x_stride, weights, steps, from, to, beside);
    case 7: return multiply_packed_rows_part<7>(x, call.x_stride, weights, steps, from, to, beside);
    case 6: return multiply_packed_rows_part<6>(x, call.x_stride, weights, steps, from, to, beside);
    case 5: return multiply_packed_rows_part<5>(x, call.x_stride, weights, steps, from, to, beside);
    case 4: return multiply_packed_rows_part<4>(x, call.x_stride, weights, steps, from, to, beside);
    case 3: return multiply_packed_rows_part<3>(x, call.x_stride, weights, steps, from, to, beside);
    case 2: return multiply_packed_rows_part<2>(x, call.x_stride, weights, steps, from, to, beside);
    case 1: return multiply_packed_rows_part<1>(x, call.x_stride, weights, steps, from, to, beside);
    default: return;
  }
}
