// A part of a product of many bfloat16 rows (packed_many_rows_amx.inl) on the tile matrix unit: 32 rows with a panel at a time, whose sums fill
// four tiles. Rows are read past the nearest cache, so that they do not push the weights out.

// Rows are multiplied in blocks of whole tiles.
struct ManyRowBlocks {
  static constexpr std::int64_t kRows = 2 * kTileSize;

  std::int64_t num_rows;

  std::int64_t count() const { return (num_rows + kRows - 1) / kRows; }
  std::int64_t first(std::int64_t block) const { return block * kRows < num_rows ? block * kRows : num_rows; }
};

// Rows [row, row + 16 kTiles) of x with `steps` times 32 inputs of a panel, added to `from` (null: to zeros).
template <int kTiles>
static void multiply_part_in_tiles(const PackedCall& call, std::int64_t row, std::int64_t input, const std::uint8_t* weights, std::int64_t steps,
                                   const float* from, float* to, BesideProducts beside) {
  constexpr int kStride = 4 * kPackedOutputs;
  SixteenRows first = sixteen_rows(call, row, input), second = sixteen_rows(call, row + (kTiles - 1) * kTileSize, input);
  // Not every compiler knows that tile loads read memory and tile stores write it.
  asm volatile("" ::: "memory");
  if (from == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTiles == 2) _tile_zero(2);
    if constexpr (kTiles == 2) _tile_zero(3);
  } else {
    _tile_loadd(0, from, kStride);
    _tile_loadd(1, from + kTileSize, kStride);
    if constexpr (kTiles == 2) _tile_loadd(2, from + kTileSize * kPackedOutputs, kStride);
    if constexpr (kTiles == 2) _tile_loadd(3, from + kTileSize * kPackedOutputs + kTileSize, kStride);
  }
  for (std::int64_t step = 0; step < steps; ++step, weights += kTileSize * kStride) {
    beside.ask.step();
    _tile_stream_loadd(4, first.data, first.bytes);
    _tile_loadd(6, weights, kStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 64, kStride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTiles == 2) {
      _tile_stream_loadd(5, second.data, second.bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    first.data += first.step;
    second.data += second.step;
    beside.pending->advance(beside.rows);
  }
  _tile_stored(0, to, kStride);
  _tile_stored(1, to + kTileSize, kStride);
  if constexpr (kTiles == 2) _tile_stored(2, to + kTileSize * kPackedOutputs, kStride);
  if constexpr (kTiles == 2) _tile_stored(3, to + kTileSize * kPackedOutputs + kTileSize, kStride);
  asm volatile("" ::: "memory");
}

static void multiply_many_part(const PackedCall& call, RowSpan rows, std::int64_t input, const std::uint8_t* weights, std::int64_t steps,
                               const float* from, float* to, BesideProducts beside) {
  if (rows.end - rows.begin > kTileSize) {
    multiply_part_in_tiles<2>(call, rows.begin, input, weights, steps, from, to, beside);
  } else {
    multiply_part_in_tiles<1>(call, rows.begin, input, weights, steps, from, to, beside);
  }
}
