// The integer products of quantized_digits.inl on the tile matrix unit (AMX). Sixteen quads of a panel are a tile as they are stored;
// with 4 bits they are widened into a buffer first. Rows of x come in tiles of sixteen; what lies in the last one beyond the call's
// rows is multiplied too, and never looked at. Two panels share each tile of x, and all rows of a block each group of weights, so that
// these are read from memory, and widened, once.

inline constexpr int kMaxGroupTiles = 2;
inline constexpr int kTileBlockRows = 64;  // whose sums stay in the nearest cache
// Bytes from the weights in use to those asked for: with 8 bits into the nearest cache, with 4, which take longer, into the next.
template <int kBits>
inline constexpr std::int64_t kTilesAhead = kBits == 8 ? 2048 : 8192;

template <int kBits>
INLINE void ask_for(const std::uint8_t* weights, std::int64_t num_bytes) {
  for (std::int64_t line = 0; line < num_bytes; line += 64) __builtin_prefetch(weights + line, 0, kBits == 8 ? 3 : 2);
}

// Weights of a group of a panel as unsigned bytes, [inputs / 4][16 outputs][4].
template <int kBits>
INLINE const std::uint8_t* weight_tiles(const std::uint8_t* weights, int num_tiles, std::uint8_t* buffer) {
  if constexpr (kBits == 8) return weights;
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int i = 0; i < num_tiles * kTileSize / 2; ++i) {
    const __m512i pair = _mm512_loadu_si512(weights + 64 * i);
    _mm512_store_si512(buffer + 128 * i, _mm512_and_si512(pair, nibble));
    _mm512_store_si512(buffer + 128 * i + 64, _mm512_and_si512(_mm512_srli_epi16(pair, 4), nibble));
  }
  return buffer;
}

// Fewer rows than a tile has take less time.
class RowsInTiles {
 public:
  explicit RowsInTiles(std::int64_t num_rows) : shapes_(kWholeTiles) {
    if (num_rows >= kTileSize) return;
    for (int tile = 0; tile < 8; ++tile)
      if (tile != 4 && tile != 5) shapes_.rows[tile] = static_cast<std::uint8_t>(num_rows);
    asm volatile("" : : "r"(&shapes_) : "memory");  // as in `TileSession`, which puts other shapes back
    _tile_loadconfig(&shapes_);
  }

 private:
  TileShapes shapes_;
};

struct alignas(64) TileSums {
  std::int32_t high[kTileSize][kTileSize];
  std::int32_t low[kTileSize][kTileSize];
};

// Sixteen rows, whose digits of the group begin at `at`, with a group of kPanels panels. Tiles 0 to 3 are the sums, 4 to 5 the weights,
// 6 to 7 the digits of x.
template <int kPanels>
INLINE void group_sums(const QuantizedCall& call, const std::uint8_t* const (&weights)[kPanels], std::int64_t at, TileSums* sums) {
  // Not every compiler knows that tile loads read memory and tile stores write it.
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kPanels == 2) _tile_zero(2);
  if constexpr (kPanels == 2) _tile_zero(3);
  for (int k = 0; k < call.group_size / kTileInputs; ++k, at += kTileBytes) {
    _tile_loadd(4, weights[0] + k * kTileBytes, 64);
    _tile_loadd(6, call.high + at, 64);
    _tile_dpbsud(0, 6, 4);
    _tile_loadd(7, call.low + at, 64);
    _tile_dpbsud(1, 7, 4);
    if constexpr (kPanels == 2) {
      _tile_loadd(5, weights[1] + k * kTileBytes, 64);
      _tile_dpbsud(2, 6, 5);
      _tile_dpbsud(3, 7, 5);
    }
  }
  _tile_stored(0, sums[0].high, 64);
  _tile_stored(1, sums[0].low, 64);
  if constexpr (kPanels == 2) _tile_stored(2, sums[1].high, 64);
  if constexpr (kPanels == 2) _tile_stored(3, sums[1].low, 64);
  asm volatile("" ::: "memory");
}

// A group's sums for `num_rows` rows, scaled and added to `totals`, [num_rows][kPanels].
template <int kPanels>
INLINE void add_group(const QuantizedCall& call, std::int64_t panel, std::int64_t group, std::int64_t row, int num_rows,
                      const TileSums (&sums)[kPanels], Reg* totals) {
  GroupScales scales[kPanels];
  for (int p = 0; p < kPanels; ++p) scales[p] = group_scales(call, ((panel + p) * call.num_groups + group) * kPanelOutputs);
  for (int r = 0; r < num_rows; ++r) {
    const std::int64_t slot = (row + r) * call.num_groups + group;
    for (int p = 0; p < kPanels; ++p, ++totals)
      *totals = add_scaled(call, slot, scales[p], _mm512_load_si512(sums[p].high[r]), _mm512_load_si512(sums[p].low[r]), *totals);
  }
}

// Rows [row, row + num_rows), a block at most. While the matrix unit multiplies sixteen rows with a group, the sums before are added.
template <class T, int kBits, int kPanels>
static void multiply_tile_block(const QuantizedCall& call, std::int64_t panel, std::int64_t row, int num_rows) {
  alignas(64) std::uint8_t buffers[kPanels][kMaxGroupTiles * kTileBytes];
  TileSums sums[2][kPanels];
  Reg totals[kTileBlockRows * kPanels];
  for (int i = 0; i < num_rows * kPanels; ++i) totals[i] = splat(0.0f);
  const int num_tiles = call.group_size / kTileInputs;
  const std::int64_t panel_bytes = call.panel_bytes();
  const std::int64_t group_bytes = num_tiles * kTileBytes * kBits / 8;
  const std::uint8_t* weights = call.weights + panel * panel_bytes;
  int turn = 0;
  const auto rows_from = [&](int first) { return num_rows - first < kTileSize ? num_rows - first : kTileSize; };
  const int last = (num_rows - 1) / kTileSize * kTileSize;  // first row of the last sixteen
  for (std::int64_t group = 0; group < call.num_groups; ++group, weights += group_bytes) {
    const std::uint8_t* tiles[kPanels];
    // Behind the panel's end lies the other one, which is in the cache already.
    const std::int64_t left = (call.num_groups - group) * group_bytes;
    const std::uint8_t* ahead = weights + kTilesAhead<kBits> + (left <= kTilesAhead<kBits> ? (kPanels - 1) * panel_bytes : 0);
    ask_for<kBits>(ahead, group_bytes);
    if (kPanels == 2 && kBits == 4) ask_for<kBits>(ahead + panel_bytes, group_bytes);
    for (int p = 0; p < kPanels; ++p) tiles[p] = weight_tiles<kBits>(weights + p * panel_bytes, num_tiles, buffers[p]);
    for (int first = 0; first < num_rows; first += kTileSize, turn ^= 1) {
      group_sums<kPanels>(call, tiles, (row + first) * call.padded_inputs() + group * call.group_size * kTileSize, sums[turn]);
      // All at once they would hold up the loads above.
      if (kPanels == 2 && kBits == 8 && first == 0) ask_for<kBits>(ahead + panel_bytes, group_bytes);
      if (first > 0) {
        const int before = first - kTileSize;
        add_group<kPanels>(call, panel, group, row + before, kTileSize, sums[turn ^ 1], totals + before * kPanels);
      } else if (group > 0) {
        add_group<kPanels>(call, panel, group - 1, row + last, rows_from(last), sums[turn ^ 1], totals + last * kPanels);
      }
    }
  }
  add_group<kPanels>(call, panel, call.num_groups - 1, row + last, rows_from(last), sums[turn ^ 1], totals + last * kPanels);
  for (int r = 0; r < num_rows; ++r)
    for (int p = 0; p < kPanels; ++p) store_panel<T>(call, panel + p, row + r, PanelSums<1>{{{totals[r * kPanels + p]}}});
}

template <class T, int kBits>
static void multiply_tiles(const QuantizedCall& call, RowSpan span) {
  const TileSession<true> session;
  const RowsInTiles rows(call.num_rows);
  for (std::int64_t panel = span.begin; panel < span.end; panel += 2) {
    for (std::int64_t row = 0; row < call.num_rows; row += kTileBlockRows) {
      const int num_rows = static_cast<int>(call.num_rows - row < kTileBlockRows ? call.num_rows - row : kTileBlockRows);
      if (panel + 1 < span.end) {
        multiply_tile_block<T, kBits, 2>(call, panel, row, num_rows);
      } else {
        multiply_tile_block<T, kBits, 1>(call, panel, row, num_rows);
      }
    }
  }
}
