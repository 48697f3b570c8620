// Products of few bfloat16 rows with packed weights (packed_linear.h). Weights are read once, in order, straight from memory; sums are
// float32. The result of a row does not depend on the other rows of the call, as long as the same of the two ways below serves it.

inline constexpr int kPackedRegs = kPackedOutputs / kWidth;
// A block of rows with a part of a panel, as many as registers hold the sums of. Each sum is one chain of additions, in the same order for
// any number of rows; to wait for memory alone, those of a single row suffice. Where weights have to become floats, several rows are
// better off with blocks of those (packed_part_wide.inl), unless registers are so short that a block reads the weights twice.
inline constexpr int kPartRegs = kPackedRegs == 2 ? 2 : 4;
inline constexpr int kMostPartRows = kPackedRegs > 2 ? 2 : PAGED_BF16_DOT ? 12 : 1;
// Bytes from the weights in use to those asked for. The processor's own prefetching ends at every page, this does not.
inline constexpr int kPackedAhead = 1024;

// Lanes of a pair of inputs, as `add_pairs` takes them again and again.
struct PairedInputs {
#if PAGED_BF16_DOT
  Words words;

  explicit PairedInputs(Words pairs) : words(pairs) {}
#else
  Reg low, high;

  explicit PairedInputs(Words pairs) : low(low_halves(pairs)), high(high_halves(pairs)) {}
#endif
};

INLINE Reg add_pairs(Reg total, const PairedInputs& x, const PairedInputs& weights) {
#if PAGED_BF16_DOT
  return dot_pairs(_mm512_castsi512_ps(x.words), _mm512_castsi512_ps(weights.words), total);
#else
  return fma(x.high, weights.high, fma(x.low, weights.low, total));
#endif
}

INLINE void store_packed(const PackedCall& call, std::int64_t row, std::int64_t output, Reg total) {
  const std::int64_t left = call.num_outputs - output;
  if (left <= 0) return;
  bf16* target = call.out + row * call.num_outputs + output;
  if (left >= kWidth) {
    store(target, call.bias == nullptr ? total : add(total, load(call.bias + output)));
  } else {
    const int count = static_cast<int>(left);
    store_n(target, call.bias == nullptr ? total : add(total, load_n(call.bias + output, count)), count);
  }
}

// The work of a block besides its products, step by step.
struct AskAhead {
  const std::uint8_t* ahead;  // weights that are needed next
  std::int64_t quarter;       // their bytes in each of four places, which are prefetched in turn
  int lines;                  // cache lines of each place to prefetch in a step of 32 inputs

  void step() {
    for (int line = 0; line < lines; ++line, ahead += 64) {
      for (int place = 0; place < 4; ++place) __builtin_prefetch(ahead + place * quarter, 0, 2);
    }
  }
};

// The addresses of kRows rows, `stride` bytes apart. Row r is thirds[r / 3] + r % 3 * stride, so that few registers hold them all.
template <int kRows>
struct RowPointers {
  const std::uint8_t* thirds[(kRows + 2) / 3];
  std::int64_t stride;

  template <class T>
  RowPointers(const T* first, std::int64_t elements_apart) : stride(elements_apart * static_cast<std::int64_t>(sizeof(T))) {
    const auto* row = reinterpret_cast<const std::uint8_t*>(first);
    for (auto& third : thirds) {
      third = row;
      row += 3 * stride;
    }
  }
  const std::uint8_t* operator[](int row) const { return thirds[row / 3] + row % 3 * stride; }
};

struct PartCall {
  const bf16* x;  // first of the rows, and of the inputs
  std::int64_t x_stride;
  const std::uint8_t* weights;  // of the panel, from that input on
  std::int64_t steps;           // times 32 inputs
  const float* from;            // what sums begin with, [rows][kPackedOutputs]; null: zeros
  float* to;                    // like `from`
  AskAhead ask;
};

// kRows rows with kPartRegs vectors of a panel's outputs, from the `first`-th on. kStreams: weights come from memory, in order.
template <int kRows, bool kStreams>
static void multiply_part_of_rows(const PartCall& call, int first) {
  constexpr int kRowBytes = 4 * kPackedOutputs;  // of a pair of inputs
  const RowPointers<kMostPartRows> rows(call.x, call.x_stride);
  const std::uint8_t* weights = call.weights + first * 4 * kWidth;
  AskAhead ask = call.ask;
  Reg sums[kRows][kPartRegs];
  // Unrolled, as at the end, so that sums stay in registers: GCC 12 would store them and load them again.
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kPartRegs; ++j)
      sums[r][j] = call.from == nullptr ? splat(0.0f) : load(call.from + r * kPackedOutputs + (first + j) * kWidth);
  std::int64_t at = 0;  // bytes of a row
  for (std::int64_t step = 0; step < call.steps; ++step) {
    if constexpr (!kStreams) ask.step();
#pragma GCC unroll 4
    for (int pair = 0; pair < kPackedInputs / 2; ++pair, at += 4, weights += kRowBytes) {
      if constexpr (kStreams) {
        for (int line = 0; line < 4 * kWidth * kPartRegs; line += 64) __builtin_prefetch(weights + kPackedAhead + line);
      }
      if constexpr (kPartRegs == 2) {
        const PairedInputs panel[2] = {PairedInputs(load_words(weights, 0)), PairedInputs(load_words(weights + 4 * kWidth, 0))};
        for (int r = 0; r < kRows; ++r) {
          const PairedInputs inputs(splat_words(rows[r] + at));
          for (int j = 0; j < 2; ++j) sums[r][j] = add_pairs(sums[r][j], inputs, panel[j]);
        }
      } else {
        for (int j = 0; j < kPartRegs; ++j) {
          const PairedInputs panel(load_words(weights + j * 4 * kWidth, 0));
          for (int r = 0; r < kRows; ++r) sums[r][j] = add_pairs(sums[r][j], PairedInputs(splat_words(rows[r] + at)), panel);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kPartRegs; ++j) store(call.to + r * kPackedOutputs + (first + j) * kWidth, sums[r][j]);
}

template <bool kStreams, int kRows = kMostPartRows>
static void multiply_part(const PartCall& call, std::int64_t num_rows) {
  if (num_rows == kRows) {
    for (int first = 0; first < kPackedRegs; first += kPartRegs) multiply_part_of_rows<kRows, kStreams>(call, first);
  } else if constexpr (kRows > 1) {
    multiply_part<kStreams, kRows - 1>(call, num_rows);
  }
}

// Multiplies at most kMostPartRows rows.
static void multiply_packed_panel(const PackedCall& call, std::int64_t panel) {
  const std::int64_t inputs = call.padded_inputs();
  alignas(64) float sums[kMostPartRows * kPackedOutputs];
  PartCall part{};
  part.x = call.x;
  part.x_stride = call.x_stride;
  part.weights = reinterpret_cast<const std::uint8_t*>(call.packed + panel * inputs * kPackedOutputs);
  part.steps = inputs / kPackedInputs;
  part.to = sums;
  multiply_part<true>(part, call.num_rows);
  for (std::int64_t row = 0; row < call.num_rows; ++row)
    for (int j = 0; j < kPackedRegs; ++j)
      store_packed(call, row, panel * kPackedOutputs + j * kWidth, load(sums + row * kPackedOutputs + j * kWidth));
}

#if PAGED_AMX
// Sixteen rows of x, `bytes` apart; the next tile of inputs is `step` elements on.
struct SixteenRows {
  const bf16* data;
  std::int64_t bytes;
  std::int64_t step;
};

INLINE SixteenRows sixteen_rows(const PackedCall& call, std::int64_t row, std::int64_t input) {
  if (call.x_in_tiles) return {call.x + row * call.num_inputs + input * kTileSize, 2 * kPackedInputs, kTileSize * kPackedInputs};
  if (row + kTileSize > call.num_rows) return {call.last_rows + input, call.padded_inputs() * 2, kPackedInputs};
  return {call.x + row * call.x_stride + input, call.x_stride * 2, kPackedInputs};
}

// Asks for the `kLines` cache lines from `address` on. Without a branch: the end of a loop of so many turns is guessed wrongly every time,
// and all that the processor had begun behind it, loads above all, is begun anew.
template <int kLines>
INLINE void ask_for_lines(const std::uint8_t* address) {
#pragma GCC unroll 32
  for (int line = 0; line < kLines; ++line) __builtin_prefetch(address + 64 * line);
}

// Memory is asked for kPages pages before it is used, a part of each in turn: what the processor fetches ahead by itself it fetches page by
// page, and every page anew has to be found out by it. While the matrix unit computes it goes on in several.
INLINE void ask_for_next_pages(const std::uint8_t* first, const std::uint8_t* now) {
  constexpr std::int64_t kPage = 4096, kPages = 4, kStep = kPackedInputs * 2 * kPackedOutputs;
  const std::int64_t done = (now - first) % (kPages * kPage);  // of these pages: as much is asked for of the next ones
  const std::uint8_t* ahead = now - done + kPages * kPage + done / kPages;
  ask_for_lines<kStep / kPages / 64>(ahead);
  ask_for_lines<kStep / kPages / 64>(ahead + kPage);
  ask_for_lines<kStep / kPages / 64>(ahead + 2 * kPage);
  ask_for_lines<kStep / kPages / 64>(ahead + 3 * kPage);
}

// kTiles tiles of sixteen rows, over all inputs: tiles 0 to 3 are the sums, 4 to 5 rows of x, 6 to 7 weights as they are stored.
template <int kTiles>
static void multiply_packed_tiles(const PackedCall& call, std::int64_t panel, std::int64_t row) {
  alignas(64) float sums[kTiles * kTileSize][kPackedOutputs];
  const std::uint8_t* first_weights = reinterpret_cast<const std::uint8_t*>(call.packed);
  const std::uint8_t* weights = first_weights + panel * call.padded_inputs() * kPackedOutputs * 2;
  SixteenRows first = sixteen_rows(call, row, 0), second = sixteen_rows(call, row + (kTiles - 1) * kTileSize, 0);
  constexpr int kStride = 4 * kPackedOutputs;
  // Not every compiler knows that tile loads read memory and tile stores write it.
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTiles == 2) _tile_zero(2);
  if constexpr (kTiles == 2) _tile_zero(3);
  for (std::int64_t input = 0; input < call.padded_inputs(); input += kPackedInputs, weights += kTileSize * kStride) {
    ask_for_next_pages(first_weights, weights);
    _tile_loadd(6, weights, kStride);
    _tile_loadd(7, weights + 64, kStride);
    _tile_loadd(4, first.data, first.bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTiles == 2) {
      _tile_loadd(5, second.data, second.bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    first.data += first.step;
    second.data += second.step;
  }
  _tile_stored(0, sums[0], kStride);
  _tile_stored(1, sums[0] + kTileSize, kStride);
  if constexpr (kTiles == 2) _tile_stored(2, sums[kTileSize], kStride);
  if constexpr (kTiles == 2) _tile_stored(3, sums[kTileSize] + kTileSize, kStride);
  asm volatile("" ::: "memory");
  for (int r = 0; r < kTiles * kTileSize && row + r < call.num_rows; ++r)
    for (int j = 0; j < kPackedRegs; ++j) store_packed(call, row + r, panel * kPackedOutputs + j * kWidth, load(sums[r] + j * kWidth));
}
#endif

static void multiply_packed(const PackedCall& call, RowSpan span) {
#if PAGED_AMX
  if (call.num_rows >= kMinPackedTileRows) {
    const TileSession<true> session;
    for (std::int64_t panel = span.begin; panel < span.end; ++panel) {
      std::int64_t row = 0;
      for (; row + kTileSize < call.num_rows; row += 2 * kTileSize) multiply_packed_tiles<2>(call, panel, row);
      if (row < call.num_rows) multiply_packed_tiles<1>(call, panel, row);
    }
    return;
  }
#endif
  for (std::int64_t panel = span.begin; panel < span.end; ++panel) multiply_packed_panel(call, panel);
}
