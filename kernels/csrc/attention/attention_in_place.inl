// Attention of up to kMaxDotRows rows, which use K and V where these lie.
//
// Where pairs of bfloat16 have no product, a vector of them becomes two of floats by one operation each: the elements with even indices, and
// those with odd ones. Queries and outputs lie in that order then, parted: of every 2 kWidth elements the even ones come first. A head_dim that
// is no multiple of these is read as floats.

static void part_row(float* row, int head_dim) {
  for (int d = 0; d < head_dim; d += 2 * kWidth) {
    float together[2 * kWidth];
    for (int i = 0; i < 2 * kWidth; ++i) together[i] = row[d + i];
    for (int i = 0; i < 2 * kWidth; ++i) row[d + i % 2 * kWidth + i / 2] = together[i];
  }
}

static void join_row(float* row, int head_dim) {
  for (int d = 0; d < head_dim; d += 2 * kWidth) {
    float parted[2 * kWidth];
    for (int i = 0; i < 2 * kWidth; ++i) parted[i] = row[d + i];
    for (int i = 0; i < 2 * kWidth; ++i) row[d + i] = parted[i % 2 * kWidth + i / 2];
  }
}

INLINE Words load_pairs(const bf16* pairs) { return load_words(reinterpret_cast<const std::uint8_t*>(pairs), 0); }

// Scores against K, four tokens at a time.
template <class T, class P, int kRows, bool kParted>
static void dot_scores(const TileRows<P>& tile, const TileRows<P>& next, int head_dim, const float* query, int query_stride,
                       float* scores) {
  constexpr int kElements = kParted || kPaired<T> ? 2 * kWidth : kWidth;  // of a vector
  const int num_words = kPaired<T> ? head_dim / 2 : head_dim;
  for (int token = tile.first; token < tile.last; token += 4) {
    const P* keys[4];
    for (int i = 0; i < 4; ++i) keys[i] = tile.k(token + i < tile.last ? token + i : tile.last - 1);
    Reg sums[kRows][4];
    for (int row = 0; row < kRows; ++row)
      for (int i = 0; i < 4; ++i) sums[row][i] = splat(0.0f);
    for (int d = 0; d < head_dim; d += kElements) {
      for (int i = 0; i < 4; ++i) prefetch(next.k(token + i < kTileTokens ? token + i : token) + d);
      if constexpr (kParted) {
        for (int i = 0; i < 4; ++i) {
          const Words pairs = load_pairs(keys[i] + d);
          const Reg even = low_halves(pairs), odd = high_halves(pairs);
          for (int row = 0; row < kRows; ++row) {
            const float* values = query + row * query_stride + d;
            sums[row][i] = fma(odd, load(values + kWidth), fma(even, load(values), sums[row][i]));
          }
        }
      } else {
        const int word = kPaired<T> ? d / 2 : d;
        Reg key[4];
        for (int i = 0; i < 4; ++i) key[i] = load_words<kPaired<T>>(keys[i], word, num_words);
        for (int row = 0; row < kRows; ++row) {
          const Reg value = load(query + row * query_stride + word);
          for (int i = 0; i < 4; ++i) sums[row][i] = multiply_add<kPaired<T>>(key[i], value, sums[row][i]);
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      float four[4];
      sum4(sums[row][0], sums[row][1], sums[row][2], sums[row][3], four);
      for (int i = 0; i < 4 && token + i < tile.last; ++i) scores[row * kTileTokens + token + i] = four[i];
    }
  }
}

// Adds weights times V to kCols vectors of the output from element `d` on.
template <class P, int kRows, int kCols, bool kParted>
static void add_values(const TileRows<P>& tile, const TileRows<P>& next, int d, int head_dim, const float* weights, const ItemRows& rows) {
  Reg sums[kRows][kCols];
  for (int row = 0; row < kRows; ++row)
    for (int col = 0; col < kCols; ++col) sums[row][col] = load(rows.output + row * rows.output_stride + d + col * kWidth);
  for (int token = tile.first; token < tile.last; ++token) {
    Reg value[kCols];
    if constexpr (kParted) {
      for (int col = 0; col < kCols; col += 2) {
        const Words pairs = load_pairs(tile.v(token) + d + col * kWidth);
        value[col] = low_halves(pairs);
        value[col + 1] = high_halves(pairs);
      }
    } else {
      for (int col = 0; col < kCols; ++col) value[col] = load_floats(tile.v(token), d + col * kWidth, head_dim);
    }
    prefetch(next.v(token) + d);
    if constexpr (kCols * kWidth * sizeof(P) > 64) prefetch(next.v(token) + d + kCols * kWidth / 2);
    for (int row = 0; row < kRows; ++row) {
      const Reg weight = splat(weights[row * kTileTokens + token]);
      for (int col = 0; col < kCols; ++col) sums[row][col] = fma(weight, value[col], sums[row][col]);
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int col = 0; col < kCols; ++col) store(rows.output + row * rows.output_stride + d + col * kWidth, sums[row][col]);
}

template <class T, class P, int kRows, bool kParted>
static void attend_tiles_in_place(const AttentionCall& call, const AttentionItem& item, const AttentionItem* following, const ItemRows& rows,
                                  const float* query, int query_stride, float* scores) {
  TileRows<P> tiles[2];
  const float factor = call.scale * kLog2E * call.key_scale(item.kv_head);
  int begin = first_tile(item);
  locate_tile(call, item, begin, tiles[0]);
  for (int index = 0; begin < item.kv_end; begin += kTileTokens, index ^= 1) {
    const TileRows<P>& tile = tiles[index];
    TileRows<P>& next = tiles[index ^ 1];
    locate_next_tile(call, item, following, begin, next);
    dot_scores<T, P, kRows, kParted>(tile, next, call.head_dim, query, query_stride, scores);
    softmax_rows<false>(scores, kTileTokens, begin, tile.first, tile.last, factor, rows, 0, kRows);
    int d = 0;
    for (; d + 4 * kWidth <= call.head_dim; d += 4 * kWidth)
      add_values<P, kRows, 4, kParted>(tile, next, d, call.head_dim, scores, rows);
    constexpr int kCols = kParted ? 2 : 1;
    for (; d < call.head_dim; d += kCols * kWidth) add_values<P, kRows, kCols, kParted>(tile, next, d, call.head_dim, scores, rows);
  }
}

template <class T, class P, int kRows>
static void attend_in_place(const AttentionCall& call, const AttentionItem& item, const AttentionItem* following, const ItemRows& rows,
                            float* query, int query_stride, float* scores) {
  if constexpr (kOperandsOf<T, P> == Operands::kWidened) {
    if (call.head_dim % (2 * kWidth) == 0) {
      for (int row = 0; row < kRows; ++row) part_row(query + row * query_stride, call.head_dim);
      attend_tiles_in_place<T, P, kRows, true>(call, item, following, rows, query, query_stride, scores);
      for (int row = 0; row < kRows; ++row) join_row(rows.output + row * rows.output_stride, call.head_dim);
      return;
    }
  }
  attend_tiles_in_place<T, P, kRows, false>(call, item, following, rows, query, query_stride, scores);
}
