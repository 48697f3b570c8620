// The instructions of the tile matrix unit (AMX) as functions, one to one, so that what is written for it is tested on processors without.
// Shapes that the unit refuses end the process. Sums of bfloat16 products are rounded after each pair, which are not the unit's bits.
// Included before the kernels, in their namespace; the instructions' names are macros of the compiler's until then.

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud

struct EmulatedTiles {
  struct Shapes {  // as the instructions read and write them
    std::uint8_t palette;
    std::uint8_t start_row;
    std::uint8_t reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  } shapes;
  alignas(64) std::uint8_t data[8][16][64];
};

static thread_local EmulatedTiles tiles;

static void require_tiles(bool holds) {
  if (!holds) __builtin_trap();
}

static void _tile_loadconfig(const void* shapes) { std::memcpy(&tiles.shapes, shapes, sizeof tiles.shapes); }
static void _tile_storeconfig(void* shapes) { std::memcpy(shapes, &tiles.shapes, sizeof tiles.shapes); }
static void _tile_release() { tiles = {}; }
static void _tile_zero(int tile) {
  require_tiles(tiles.shapes.palette == 1 && tiles.shapes.rows[tile] > 0 && tiles.shapes.row_bytes[tile] > 0);
  std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

static void _tile_loadd(int tile, const void* base, std::int64_t stride) {
  _tile_zero(tile);
  for (int row = 0; row < tiles.shapes.rows[tile]; ++row)
    std::memcpy(tiles.data[tile][row], static_cast<const std::uint8_t*>(base) + row * stride, tiles.shapes.row_bytes[tile]);
}

static void _tile_stream_loadd(int tile, const void* base, std::int64_t stride) { _tile_loadd(tile, base, stride); }

static void _tile_stored(int tile, void* base, std::int64_t stride) {
  require_tiles(tiles.shapes.palette == 1);
  for (int row = 0; row < tiles.shapes.rows[tile]; ++row)
    std::memcpy(static_cast<std::uint8_t*>(base) + row * stride, tiles.data[tile][row], tiles.shapes.row_bytes[tile]);
}

// Adds word k of row m of `left`, times row k of `right`, to row m of `sums`: pairs of bfloat16, or signed bytes on the left and unsigned
// ones on the right.
template <bool kBytes>
static void add_products(int sums, int left, int right) {
  const EmulatedTiles::Shapes& shapes = tiles.shapes;
  require_tiles(shapes.palette == 1 && sums != left && sums != right && left != right);
  require_tiles(shapes.rows[sums] == shapes.rows[left] && shapes.row_bytes[left] == 4 * shapes.rows[right] &&
                shapes.row_bytes[sums] == shapes.row_bytes[right]);
  for (int m = 0; m < tiles.shapes.rows[left]; ++m) {
    __m512i total = _mm512_load_si512(tiles.data[sums][m]);
    for (int k = 0; k < tiles.shapes.row_bytes[left] / 4; ++k) {
      std::int32_t word;
      std::memcpy(&word, tiles.data[left][m] + 4 * k, sizeof word);
      const __m512i a = _mm512_set1_epi32(word), b = _mm512_load_si512(tiles.data[right][k]);
      if constexpr (kBytes) {
        total = _mm512_dpbusd_epi32(total, b, a);
      } else {
        total = _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(total), (__m512bh)a, (__m512bh)b));
      }
    }
    _mm512_store_si512(tiles.data[sums][m], total);
  }
}

static void _tile_dpbf16ps(int sums, int left, int right) { add_products<false>(sums, left, right); }
static void _tile_dpbsud(int sums, int left, int right) { add_products<true>(sums, left, right); }
