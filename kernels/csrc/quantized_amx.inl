// The integer products of quantized_digits.inl on the tile matrix unit (AMX). Sixteen quads of a panel are a tile as they are stored;
// with 4 bits they are widened into a buffer first. Rows of x come in tiles of sixteen; what lies in the last one beyond the call's
// rows is multiplied too, and never looked at.

inline constexpr std::int64_t kMinTileRows = 4;  // fewer are faster without
inline constexpr int kTileInputs = 64;           // a row of a tile of digits
inline constexpr int kMaxGroupTiles = 2;

// 64 inputs of a panel as unsigned bytes, [16 quads][16 outputs][4].
template <int kBits>
INLINE const std::uint8_t* weight_tile(const std::uint8_t* weights, std::uint8_t* buffer) {
  if constexpr (kBits == 8) return weights;
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int i = 0; i < kTileSize / 2; ++i) {
    const __m512i pair = _mm512_loadu_si512(weights + 64 * i);
    _mm512_storeu_si512(buffer + 128 * i, _mm512_and_si512(pair, nibble));
    _mm512_storeu_si512(buffer + 128 * i + 64, _mm512_and_si512(_mm512_srli_epi16(pair, 4), nibble));
  }
  return buffer;
}

struct TileSums {
  alignas(64) std::int32_t high[kTileSize][kTileSize];
  alignas(64) std::int32_t low[kTileSize][kTileSize];
};

// One group of a panel for kTiles tiles of rows. Tiles 0 to 3 are the sums, 4 the weights, 5 to 6 the digits of x.
template <int kBits, int kTiles>
static void group_sums(const QuantizedCall& call, const std::uint8_t* weights, std::int64_t at, TileSums* sums) {
  alignas(64) std::uint8_t buffer[kMaxGroupTiles * kTileInputs * kPanelOutputs];
  const int stride = static_cast<int>(call.padded_inputs());
  const std::int64_t tile_stride = static_cast<std::int64_t>(stride) * kTileSize;
  const int num_tiles = call.group_size / kTileInputs;
  const std::uint8_t* tiles[kMaxGroupTiles];
  for (int k = 0; k < num_tiles; ++k)
    tiles[k] = weight_tile<kBits>(weights + k * kTileInputs * kPanelOutputs * kBits / 8, buffer + k * kTileInputs * kPanelOutputs);
  // Not every compiler knows that tile loads read memory and tile stores write it.
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTiles == 2) _tile_zero(2);
  if constexpr (kTiles == 2) _tile_zero(3);
  for (int k = 0; k < num_tiles; ++k, at += kTileInputs) {
    _tile_loadd(4, tiles[k], 64);
    _tile_loadd(5, call.high + at, stride);
    _tile_dpbsud(0, 5, 4);
    _tile_loadd(6, call.low + at, stride);
    _tile_dpbsud(1, 6, 4);
    if constexpr (kTiles == 2) {
      _tile_loadd(5, call.high + at + tile_stride, stride);
      _tile_dpbsud(2, 5, 4);
      _tile_loadd(6, call.low + at + tile_stride, stride);
      _tile_dpbsud(3, 6, 4);
    }
  }
  _tile_stored(0, sums[0].high, 64);
  _tile_stored(1, sums[0].low, 64);
  if constexpr (kTiles == 2) _tile_stored(2, sums[1].high, 64);
  if constexpr (kTiles == 2) _tile_stored(3, sums[1].low, 64);
  asm volatile("" ::: "memory");
}

template <class T, int kBits, int kTiles>
static void tile_panel(const QuantizedCall& call, std::int64_t panel, std::int64_t row, int num_rows) {
  const std::uint8_t* weights = call.weights + panel * call.panel_bytes();
  Reg totals[kTiles * kTileSize];
  for (int r = 0; r < num_rows; ++r) totals[r] = splat(0.0f);
  for (std::int64_t group = 0; group < call.num_groups; ++group) {
    TileSums sums[kTiles];
    const std::int64_t at = row * call.padded_inputs() + group * call.group_size;
    group_sums<kBits, kTiles>(call, weights + group * call.group_size * kPanelOutputs * kBits / 8, at, sums);
    const GroupScales scales = group_scales(call, (panel * call.num_groups + group) * kPanelOutputs);
    for (int r = 0; r < num_rows; ++r) {
      const TileSums& tile = sums[r / kTileSize];
      const __m512i high = _mm512_load_si512(tile.high[r % kTileSize]);
      const __m512i low = _mm512_load_si512(tile.low[r % kTileSize]);
      totals[r] = add_scaled(call, (row + r) * call.num_groups + group, scales, high, low, totals[r]);
    }
  }
  for (int r = 0; r < num_rows; ++r) store_panel<T>(call, panel, row + r, PanelSums<1>{{{totals[r]}}});
}

template <class T, int kBits>
static void multiply_tiles(const QuantizedCall& call, RowSpan span) {
  const TileSession<true> session;
  for (std::int64_t panel = span.begin; panel < span.end; ++panel) {
    for (std::int64_t row = 0; row < call.num_rows; row += 2 * kTileSize) {
      const int num_rows = static_cast<int>(call.num_rows - row < 2 * kTileSize ? call.num_rows - row : 2 * kTileSize);
      if (num_rows > kTileSize) {
        tile_panel<T, kBits, 2>(call, panel, row, num_rows);
      } else {
        tile_panel<T, kBits, 1>(call, panel, row, num_rows);
      }
    }
  }
}
