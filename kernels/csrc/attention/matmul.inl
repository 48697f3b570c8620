// C (+)= A B in registers, for matrices in scratch memory. Every element of C is summed in order of depth, whatever the shape.

// What a 32-bit word of an operand is: a float, or a pair of bfloat16 that is adjacent along the depth.
enum class Operands {
  kFloats,
  kWidened,  // pairs in B, floats in A: B has half the words to pack and to load, and each becomes two floats for all rows of a block
  kPairs,    // in both; the instruction set has a product of them
};

// Whether rows of T are multiplied as pairs.
template <class T>
inline constexpr bool kPaired = PAGED_BF16_DOT && std::is_same_v<T, bf16>;

// Those of rows of T with rows of P from the pool.
template <class T, class P>
inline constexpr Operands kOperandsOf = kPaired<T>                                             ? Operands::kPairs
                                        : std::is_same_v<T, bf16> && std::is_same_v<P, bf16> ? Operands::kWidened
                                                                                             : Operands::kFloats;

template <bool kPairs>
INLINE Reg multiply_add(Reg a, Reg b, Reg c) {
#if PAGED_BF16_DOT
  if constexpr (kPairs) return dot_pairs(a, b, c);
#endif
  return fma(a, b, c);
}

struct Matmul {
  int depth;  // in words of B
  const float* a;
  int a_stride;
  const float* b;
  int b_stride;
  float* c;
  int c_stride;
  bool accumulate;
};

// Must be alive around products of pairs (`matmul` and those of packed weights); most instruction sets need nothing.
template <bool kPairs>
class TileSession {
 public:
  TileSession() {}
};

#if PAGED_AMX
#include "attention/matmul_amx.inl"
#endif

// Adds the products of an element of each of kRows rows of A with a row of B.
template <bool kPairs, int kRows, int kCols>
INLINE void add_products(const float* a, int a_stride, const Reg (&columns)[kCols], Reg (&sums)[kRows][kCols]) {
  for (int i = 0; i < kRows; ++i) {
    const Reg value = splat(a[i * a_stride]);
    for (int j = 0; j < kCols; ++j) sums[i][j] = multiply_add<kPairs>(value, columns[j], sums[i][j]);
  }
}

template <Operands kOperands, int kRows, int kCols, class Ahead>
static void matmul_block(const Matmul& m, int row, int col, Ahead& ahead) {
  const float* a = m.a + row * m.a_stride;
  const float* b = m.b + col;
  float* c = m.c + row * m.c_stride + col;
  Reg sums[kRows][kCols];
  // Unrolled, as at the end, so that sums stay in registers: GCC 12 would store some of them in every turn of the products.
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j) sums[i][j] = m.accumulate ? load(c + i * m.c_stride + j * kWidth) : splat(0.0f);
  Ahead asking = ahead;  // a copy can stay in registers
  for (int k = 0; k < m.depth; ++k) {
    asking.step();
    Reg columns[kCols];
    if constexpr (kOperands == Operands::kWidened) {
      const auto* words = reinterpret_cast<const std::uint8_t*>(b + k * m.b_stride);
      for (int j = 0; j < kCols; ++j) columns[j] = low_halves(load_words(words + j * 4 * kWidth, 0));
      add_products<false>(a + 2 * k, m.a_stride, columns, sums);
      for (int j = 0; j < kCols; ++j) columns[j] = high_halves(load_words(words + j * 4 * kWidth, 0));
      add_products<false>(a + 2 * k + 1, m.a_stride, columns, sums);
    } else {
      for (int j = 0; j < kCols; ++j) columns[j] = load(b + k * m.b_stride + j * kWidth);
      add_products<kOperands == Operands::kPairs>(a + k, m.a_stride, columns, sums);
    }
  }
  ahead = asking;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kCols; ++j) store(c + i * m.c_stride + j * kWidth, sums[i][j]);
}

// Rows of a block of C, at most. Dot products of pairs are so short a loop that the ends of it count: a block that leaves registers free for
// the next one to begin while this one is stored is faster than one that fills them.
template <Operands kOperands>
inline constexpr int kMatmulRows = kOperands == Operands::kPairs ? 4 : kOperands == Operands::kWidened ? kWidenedRowBlock : kRowBlock;

template <Operands kOperands>
constexpr int matmul_row_blocks(int rows) {
  return (rows + kMatmulRows<kOperands> - 1) / kMatmulRows<kOperands>;
}

// Steps along the depth that `matmul` takes, in all blocks of C.
template <Operands kOperands>
constexpr int matmul_steps(int depth, int rows, int cols) {
  return depth * matmul_row_blocks<kOperands>(rows) * ((cols / kWidth + kColBlock - 1) / kColBlock);
}

// Calls `matmul_block` for a number of rows that is known only now.
template <Operands kOperands, int kCols, class Ahead, int kRows = kMatmulRows<kOperands>>
static void matmul_rows(const Matmul& m, int row, int rows, int col, Ahead& ahead) {
  if (rows == kRows) {
    matmul_block<kOperands, kRows, kCols>(m, row, col, ahead);
  } else if constexpr (kRows > 1) {
    matmul_rows<kOperands, kCols, Ahead, kRows - 1>(m, row, rows, col, ahead);
  }
}

// Blocks have nearly the same number of rows: one of few rows would have too few sums to hide the latency of each.
template <Operands kOperands, int kCols>
static void matmul_columns(const Matmul& m, int rows, int col, RowsAhead& ahead) {
  const int num_blocks = matmul_row_blocks<kOperands>(rows);
  const int least = rows / num_blocks;
  const int num_longer = rows % num_blocks;
  for (int block = 0, row = 0; block < num_blocks; ++block) {
    const int count = least + (block < num_longer ? 1 : 0);
    if (!ahead.done()) {
      matmul_rows<kOperands, kCols>(m, row, count, col, ahead);
    } else {
      NothingAhead nothing;  // asking whether anything is left is not free in so short a loop
      matmul_rows<kOperands, kCols>(m, row, count, col, nothing);
    }
    row += count;
  }
}

// `cols` is a multiple of kWidth. Without a matrix unit `ahead` takes a step with every step along the depth.
template <Operands kOperands>
static void matmul(const Matmul& m, int rows, int cols, [[maybe_unused]] RowsAhead& ahead) {
#if PAGED_AMX
  if constexpr (kOperands == Operands::kPairs) return matmul_amx(m, rows, cols);
#endif
  int col = 0;
  for (; col + kColBlock * kWidth <= cols; col += kColBlock * kWidth) matmul_columns<kOperands, kColBlock>(m, rows, col, ahead);
  switch ((cols - col) / kWidth) {
    case 3: return matmul_columns<kOperands, 3>(m, rows, col, ahead);
    case 2: return matmul_columns<kOperands, 2>(m, rows, col, ahead);
    case 1: return matmul_columns<kOperands, 1>(m, rows, col, ahead);
    default: return;
  }
}
