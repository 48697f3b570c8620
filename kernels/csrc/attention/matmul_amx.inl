// The bfloat16 product on the tile matrix unit (AMX), for the operands of matmul.inl: pairs along the depth are its native layout. A tile
// is 16 rows of 64 bytes. Rows are processed in whole tiles, so matrices in scratch memory have a multiple of 16 rows.

inline constexpr int kTileSize = 16;  // rows, and 32-bit words in a row

struct alignas(64) TileShapes {
  std::uint8_t palette;
  std::uint8_t start_row;
  std::uint8_t reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

inline constexpr TileShapes kWholeTiles{1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Tile shapes for the lifetime of the object. Another library of the process (oneDNN) may count on its own: they are put back at the end.
template <>
class TileSession<true> {
 public:
  TileSession() {
    // Compilers believe that these instructions touch eight bytes: all of `saved_` has to be memory for them.
    asm volatile("" : : "r"(&saved_) : "memory");
    _tile_storeconfig(&saved_);
    _tile_loadconfig(&kWholeTiles);
  }
  ~TileSession() {
    if (saved_.palette != 0) {
      _tile_loadconfig(&saved_);
    } else {
      _tile_release();
    }
  }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

 private:
  TileShapes saved_;
};

// Tiles 0 to 3 hold a 2 x 2 block of C, tiles 4 and 5 rows of A, tiles 6 and 7 columns of B.
template <int kRowTiles, int kColTiles>
static void amx_block(const Matmul& m, int row, int col) {
  const float* a = m.a + row * m.a_stride;
  const float* b = m.b + col;
  float* c = m.c + row * m.c_stride + col;
  const int a_bytes = m.a_stride * 4;
  const int b_bytes = m.b_stride * 4;
  const int c_bytes = m.c_stride * 4;
  if (m.accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (kColTiles == 2) _tile_loadd(1, c + kTileSize, c_bytes);
    if constexpr (kRowTiles == 2) _tile_loadd(2, c + kTileSize * m.c_stride, c_bytes);
    if constexpr (kRowTiles == 2 && kColTiles == 2) _tile_loadd(3, c + kTileSize * m.c_stride + kTileSize, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (kColTiles == 2) _tile_zero(1);
    if constexpr (kRowTiles == 2) _tile_zero(2);
    if constexpr (kRowTiles == 2 && kColTiles == 2) _tile_zero(3);
  }
  for (int k = 0; k < m.depth; k += kTileSize, a += kTileSize, b += kTileSize * m.b_stride) {
    _tile_loadd(4, a, a_bytes);
    if constexpr (kRowTiles == 2) _tile_loadd(5, a + kTileSize * m.a_stride, a_bytes);
    _tile_loadd(6, b, b_bytes);
    if constexpr (kColTiles == 2) _tile_loadd(7, b + kTileSize, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColTiles == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRowTiles == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRowTiles == 2 && kColTiles == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (kColTiles == 2) _tile_stored(1, c + kTileSize, c_bytes);
  if constexpr (kRowTiles == 2) _tile_stored(2, c + kTileSize * m.c_stride, c_bytes);
  if constexpr (kRowTiles == 2 && kColTiles == 2) _tile_stored(3, c + kTileSize * m.c_stride + kTileSize, c_bytes);
}

template <int kRowTiles>
static void amx_rows(const Matmul& m, int row, int cols) {
  int col = 0;
  for (; col + 2 * kTileSize <= cols; col += 2 * kTileSize) amx_block<kRowTiles, 2>(m, row, col);
  if (col < cols) amx_block<kRowTiles, 1>(m, row, col);
}

// The depth is padded to whole tiles: A and B are zero there.
static void matmul_amx(const Matmul& m, int rows, int cols) {
  // Not every compiler knows that tile loads read memory and tile stores write it.
  asm volatile("" ::: "memory");
  int row = 0;
  for (; row + kTileSize < rows; row += 2 * kTileSize) amx_rows<2>(m, row, cols);
  if (row < rows) amx_rows<1>(m, row, cols);
  asm volatile("" ::: "memory");
}
