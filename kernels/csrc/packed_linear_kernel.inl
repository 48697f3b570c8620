// Products of few bfloat16 rows with packed weights (packed_linear.h). Weights are read once, in order, straight from memory; sums are
// float32. The result of a row does not depend on the other rows of the call, as long as the same of the two ways below serves it.

inline constexpr int kPackedRegs = kPackedOutputs / kWidth;
inline constexpr int kPackedRows = kPackedRegs == 2 ? 6 : 2;    // at a time, as registers allow
inline constexpr int kPackedChains = kPackedRegs == 2 ? 2 : 1;  // sums in flight, which hide the latency of each
inline constexpr std::int64_t kFewPackedRows = PAGED_AMX ? 32 : PAGED_BF16_DOT ? 8 : kPackedRegs == 2 ? 4 : 1;
// Bytes from the weights in use to those asked for. The processor's own prefetching ends at every page, this does not.
inline constexpr int kPackedAhead = 1024;

INLINE Reg add_pairs(Reg total, Words x, Words weights) {
#if PAGED_BF16_DOT
  return dot_pairs(_mm512_castsi512_ps(x), _mm512_castsi512_ps(weights), total);
#else
  return fma(high_halves(x), high_halves(weights), fma(low_halves(x), low_halves(weights), total));
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

template <int kRows>
static void multiply_packed_rows(const PackedCall& call, std::int64_t panel, std::int64_t row) {
  const std::int64_t num_pairs = call.padded_inputs() / 2;
  const std::uint8_t* weights = reinterpret_cast<const std::uint8_t*>(call.packed + panel * call.padded_inputs() * kPackedOutputs);
  const std::uint8_t* x = reinterpret_cast<const std::uint8_t*>(call.x + row * call.x_stride);
  const std::int64_t x_bytes = call.x_stride * 2;
  Reg sums[kRows][kPackedRegs][kPackedChains];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kPackedRegs; ++j)
      for (int c = 0; c < kPackedChains; ++c) sums[r][j][c] = splat(0.0f);
  for (std::int64_t pair = 0; pair < num_pairs; pair += kPackedChains, x += 4 * kPackedChains) {
    for (int c = 0; c < kPackedChains; ++c, weights += 4 * kPackedOutputs) {
      __builtin_prefetch(weights + kPackedAhead);
      __builtin_prefetch(weights + kPackedAhead + 64);
      Words words[kPackedRegs];
      for (int j = 0; j < kPackedRegs; ++j) words[j] = load_words(weights + j * 4 * kWidth, 0);
      for (int r = 0; r < kRows; ++r) {
        const Words inputs = splat_words(x + r * x_bytes + 4 * c);
        for (int j = 0; j < kPackedRegs; ++j) sums[r][j][c] = add_pairs(sums[r][j][c], inputs, words[j]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kPackedRegs; ++j) {
      for (int c = 1; c < kPackedChains; ++c) sums[r][j][0] = add(sums[r][j][0], sums[r][j][c]);
      store_packed(call, row + r, panel * kPackedOutputs + j * kWidth, sums[r][j][0]);
    }
  }
}

static void multiply_packed_panel(const PackedCall& call, std::int64_t panel) {
  std::int64_t row = 0;
  for (; row + kPackedRows <= call.num_rows; row += kPackedRows) multiply_packed_rows<kPackedRows>(call, panel, row);
  if constexpr (kPackedRows > 2) {
    switch (call.num_rows - row) {
      case 5: return multiply_packed_rows<5>(call, panel, row);
      case 4: return multiply_packed_rows<4>(call, panel, row);
      case 3: return multiply_packed_rows<3>(call, panel, row);
      case 2: return multiply_packed_rows<2>(call, panel, row);
      default: break;
    }
  }
  if (row < call.num_rows) multiply_packed_rows<1>(call, panel, row);
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
