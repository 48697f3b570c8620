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

// Must be alive around calls of `matmul<kPairs>`; most instruction sets need nothing.
template <bool kPairs>
class TileSession {
 public:
  TileSession() {}
};

#if PAGED_AMX
#include "matmul_amx.inl"
#endif

template <bool kPairs, int kRows, int kCols>
static void matmul_block(const Matmul& m, int row, int col) {
  const float* a = m.a + row * m.a_stride;
  const float* b = m.b + col;
  float* c = m.c + row * m.c_stride + col;
  Reg sums[kRows][kCols];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j) sums[i][j] = m.accumulate ? load(c + i * m.c_stride + j * kWidth) : splat(0.0f);
  for (int k = 0; k < m.depth; ++k) {
    Reg columns[kCols];
    for (int j = 0; j < kCols; ++j) columns[j] = load(b + k * m.b_stride + j * kWidth);
    for (int i = 0; i < kRows; ++i) {
      const Reg value = splat(a[i * m.a_stride + k]);
      for (int j = 0; j < kCols; ++j) sums[i][j] = multiply_add<kPairs>(value, columns[j], sums[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j) store(c + i * m.c_stride + j * kWidth, sums[i][j]);
}

// Rows of a block of C. Dot products of pairs are so short a loop that the ends of it count: a block that leaves registers free for the
// next one to begin while this one is stored is faster than one that fills them.
template <bool kPairs>
inline constexpr int kMatmulRows = kPairs ? 4 : kRowBlock;

template <bool kPairs, int kCols>
static void matmul_columns(const Matmul& m, int rows, int col) {
  constexpr int kRows = kMatmulRows<kPairs>;
  int row = 0;
  for (; row + kRows <= rows; row += kRows) matmul_block<kPairs, kRows, kCols>(m, row, col);
  switch (rows - row) {
    case 5: return matmul_block<kPairs, 5, kCols>(m, row, col);
    case 4: return matmul_block<kPairs, 4, kCols>(m, row, col);
    case 3: return matmul_block<kPairs, 3, kCols>(m, row, col);
    case 2: return matmul_block<kPairs, 2, kCols>(m, row, col);
    case 1: return matmul_block<kPairs, 1, kCols>(m, row, col);
    default: return;
  }
}

// `cols` is a multiple of kWidth.
template <bool kPairs>
static void matmul(const Matmul& m, int rows, int cols) {
#if PAGED_AMX
  if constexpr (kPairs) return matmul_amx(m, rows, cols);
#endif
  int col = 0;
  for (; col + kColBlock * kWidth <= cols; col += kColBlock * kWidth) matmul_columns<kPairs, kColBlock>(m, rows, col);
  switch ((cols - col) / kWidth) {
    case 3: return matmul_columns<kPairs, 3>(m, rows, col);
    case 2: return matmul_columns<kPairs, 2>(m, rows, col);
    case 1: return matmul_columns<kPairs, 1>(m, rows, col);
    default: return;
  }
}
