// C (+)= A B in registers, for matrices in scratch memory. Elements of A and B are 32-bit words: one float, or with kPaired a pair of
// bfloat16 that is adjacent along the depth. Every element of C is summed in order of depth, whatever the shape.

template <class T>
inline constexpr bool kPaired = PAGED_BF16_DOT && std::is_same_v<T, bf16>;

template <bool kPairs>
INLINE Reg multiply_add(Reg a, Reg b, Reg c) {
#if PAGED_BF16_DOT
  if constexpr (kPairs) return dot_pairs(a, b, c);
#endif
  return fma(a, b, c);
}

struct Matmul {
  int depth;  // in words
  const float* a;
  int a_stride;
  const float* b;
  int b_stride;
  float* c;
  int c_stride;
  bool accumulate;
};

// Whether products may ask for rows ahead. In the short loops over pairs a row with each step is a good pace; in those over floats, which
// take many more steps for each row, it is too much at first.
template <bool kPairs>
inline constexpr bool kAsksInProducts = kPairs && !PAGED_AMX;

// Must be alive around calls of `matmul<kPairs>`; most instruction sets need nothing.
template <bool kPairs>
class TileSession {
 public:
  TileSession() {}
};

#if PAGED_AMX
#include "matmul_amx.inl"
#endif

template <bool kPairs, int kRows, int kCols, class Ahead>
static void matmul_block(const Matmul& m, int row, int col, Ahead& ahead) {
  const float* a = m.a + row * m.a_stride;
  const float* b = m.b + col;
  float* c = m.c + row * m.c_stride + col;
  Reg sums[kRows][kCols];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j) sums[i][j] = m.accumulate ? load(c + i * m.c_stride + j * kWidth) : splat(0.0f);
  Ahead asking = ahead;  // a copy can stay in registers
  for (int k = 0; k < m.depth; ++k) {
    asking.step();
    Reg columns[kCols];
    for (int j = 0; j < kCols; ++j) columns[j] = load(b + k * m.b_stride + j * kWidth);
    for (int i = 0; i < kRows; ++i) {
      const Reg value = splat(a[i * m.a_stride + k]);
      for (int j = 0; j < kCols; ++j) sums[i][j] = multiply_add<kPairs>(value, columns[j], sums[i][j]);
    }
  }
  ahead = asking;
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j) store(c + i * m.c_stride + j * kWidth, sums[i][j]);
}

// Rows of a block of C. Dot products of pairs are so short a loop that the ends of it count: a block that leaves registers free for the
// next one to begin while this one is stored is faster than one that fills them.
template <bool kPairs>
inline constexpr int kMatmulRows = kPairs ? 4 : kRowBlock;

// Steps along the depth that `matmul` takes, in all blocks of C.
template <bool kPairs>
constexpr int matmul_steps(int depth, int rows, int cols) {
  const int row_blocks = (rows + kMatmulRows<kPairs> - 1) / kMatmulRows<kPairs>;
  return depth * row_blocks * ((cols / kWidth + kColBlock - 1) / kColBlock);
}

template <bool kPairs, int kCols, class Ahead>
static void matmul_columns(const Matmul& m, int rows, int col, Ahead& ahead) {
  constexpr int kRows = kMatmulRows<kPairs>;
  int row = 0;
  for (; row + kRows <= rows; row += kRows) matmul_block<kPairs, kRows, kCols>(m, row, col, ahead);
  if constexpr (kRows > 4) {
    if (rows - row == 5) return matmul_block<kPairs, 5, kCols>(m, row, col, ahead);
    if (rows - row == 4) return matmul_block<kPairs, 4, kCols>(m, row, col, ahead);
  }
  switch (rows - row) {
    case 3: return matmul_block<kPairs, 3, kCols>(m, row, col, ahead);
    case 2: return matmul_block<kPairs, 2, kCols>(m, row, col, ahead);
    case 1: return matmul_block<kPairs, 1, kCols>(m, row, col, ahead);
    default: return;
  }
}

template <bool kPairs, class Ahead>
static void matmul_in_registers(const Matmul& m, int rows, int cols, Ahead& ahead) {
  int col = 0;
  for (; col + kColBlock * kWidth <= cols; col += kColBlock * kWidth) matmul_columns<kPairs, kColBlock>(m, rows, col, ahead);
  switch ((cols - col) / kWidth) {
    case 3: return matmul_columns<kPairs, 3>(m, rows, col, ahead);
    case 2: return matmul_columns<kPairs, 2>(m, rows, col, ahead);
    case 1: return matmul_columns<kPairs, 1>(m, rows, col, ahead);
    default: return;
  }
}

// `cols` is a multiple of kWidth. With kAsksInProducts `ahead` takes a step with every step along the depth.
template <bool kPairs>
static void matmul(const Matmul& m, int rows, int cols, [[maybe_unused]] RowsAhead& ahead) {
#if PAGED_AMX
  if constexpr (kPairs) return matmul_amx(m, rows, cols);
#endif
  if constexpr (kAsksInProducts<kPairs>) {
    if (!ahead.done()) return matmul_in_registers<kPairs>(m, rows, cols, ahead);
  }
  NothingAhead nothing;  // asking whether anything is left is not free in so short a loop
  matmul_in_registers<kPairs>(m, rows, cols, nothing);
}
