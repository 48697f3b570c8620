// Paged attention of one item: online softmax over KV tiles (Dao, "FlashAttention-2", 2023, section 3.1) read through a block table
// (Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023). The query heads that share a KV head are rows of
// one matrix, so a KV tile is loaded once for all of them. Nothing outside the item's KV range is read. T is the element type of queries
// and outputs, P that of the pool: T, or e4m3, whose scales go into the scores and into the outputs.

// Up to this many rows, K and V rows are used where they lie (attention_in_place.inl); from there on it pays to pack a tile for `matmul`.
inline constexpr int kMaxDotRows = 3;

inline constexpr int kShortRowBytes = 128;

inline constexpr float kLog2E = 1.44269504f;

// A matrix unit takes all rows of an item and whole tiles. Elsewhere few rows go from scores to output together: their scores stay in the
// nearest cache, and tokens that none of them sees are left out, which adds nothing but zeros and so, as long as V is finite, does not change a bit.
template <bool kPairs>
inline constexpr bool kWholeItems = PAGED_AMX && kPairs;
template <bool kPairs>
inline constexpr int kAttendRows = kWholeItems<kPairs> ? 1 << 30 : 12;

// The tensors an item works on, beside its scratch. Row r is query r / group, head r % group.
struct ItemRows {
  int count;
  int group;
  std::int64_t first_position;  // of query 0 in the sequence
  std::int64_t window;
  float* maxima;  // the largest scores, before they are scaled
  float* sums;    // [count, kMaxWidth], added up at the end
  float* output;  // [count, output_stride], unnormalised
  int output_stride;

  // Positions [begin, end) that a row sees.
  std::int64_t begin(int row) const {
    const std::int64_t end_position = end(row);
    return window > 0 && end_position > window ? end_position - window : 0;
  }
  std::int64_t end(int row) const { return first_position + row / group + 1; }
};

// Elements `d` .. of a row, as float32. Lanes past the row's end are zero.
template <class P>
INLINE Reg load_floats(const P* row, int d, int head_dim) {
  return head_dim - d >= kWidth ? load(row + d) : load_n(row + d, head_dim - d);
}

// Loads the same as words, each of which is a float or with kPairs two elements in bfloat16.
template <bool kPairs, class P>
INLINE Reg load_words(const P* row, int word, int num_words) {
#if PAGED_BF16_DOT
  if constexpr (kPairs && std::is_same_v<P, e4m3>) return load_pairs(row + 2 * word, num_words - word);
#endif
  if constexpr (kPairs) {
    return load_floats(reinterpret_cast<const float*>(row), word, num_words);  // vector loads may alias
  } else {
    return load_floats(row, word, num_words);
  }
}

template <bool kPairs, class P>
INLINE const P* word_address(const P* row, int word) {
  return row + (kPairs ? 2 * word : word);
}

template <class T>
static void copy_queries(const AttentionCall& call, const AttentionItem& item, const ItemRows& rows, float* target, int stride) {
  const int num_words = kPaired<T> ? call.head_dim / 2 : call.head_dim;
  const T* query = static_cast<const T*>(call.query);
  const std::int64_t first_token = call.query_start_loc[item.sequence] + item.first_query;
  for (int row = 0; row < rows.count; ++row) {
    const std::int64_t head = static_cast<std::int64_t>(item.kv_head) * rows.group + row % rows.group;
    const T* source = query + (first_token + row / rows.group) * call.query_token_stride + head * call.query_head_stride;
    for (int word = 0; word < stride; word += kWidth)
      store(target + row * stride + word, word < num_words ? load_words<kPaired<T>>(source, word, num_words) : splat(0.0f));
  }
}

// K of a tile as [words, kTileTokens], words padded to kWidth. With `asks` rows of the next tile are asked for.
template <bool kPairs, class P>
static void pack_keys(const TileRows<P>& tile, const TileRows<P>& next, bool asks, int num_words, float* target) {
  for (int token = 0; token < kTileTokens; token += kWidth) {
    for (int word = 0; word < num_words; word += kWidth) {
      Reg block[kWidth];
      if (word + kWidth <= num_words) {
        for (int i = 0; i < kWidth; ++i) block[i] = load_words<kPairs>(tile.k(token + i), word, word + kWidth);
      } else {
        for (int i = 0; i < kWidth; ++i) block[i] = load_words<kPairs>(tile.k(token + i), word, num_words);
      }
      if (asks) {
        for (int i = 0; i < kWidth; ++i) prefetch(word_address<kPairs>(next.k(token + i), word));
      }
      transpose(block);
      for (int i = 0; i < kWidth; ++i) store(target + (word + i) * kTileTokens + token, block[i]);
    }
  }
}

// V of a tile as [kTileTokens / 2, stride] words of two tokens each. With kWhole rows are whole vectors, and there is nothing to decide.
template <bool kWhole, class P>
static void pack_value_pairs(const TileRows<P>& tile, const TileRows<P>& next, bool asks, int head_dim, int stride, float* target) {
  for (int token = 0; token < kTileTokens; token += 2) {
    const P* low = tile.v(token);
    const P* high = tile.v(token + 1);
    for (int d = 0; d < stride; d += kWidth, target += kWidth) {
      const int count = kWhole || d + kWidth <= head_dim ? kWidth : head_dim - d;
      store(target, interleave(low + d, high + d, count));
      // both rows in turn: a line holds at least 2 kWidth values
      if (asks) prefetch(next.v(token + d / kWidth % 2) + d / (2 * kWidth) * (2 * kWidth));
    }
  }
}

// V of a tile as the second operand of `matmul`.
template <bool kPairs, class P>
static void pack_values(const TileRows<P>& tile, const TileRows<P>& next, bool asks, int head_dim, int stride, float* target) {
  if constexpr (kPairs) {
    return head_dim == stride ? pack_value_pairs<true>(tile, next, asks, head_dim, stride, target)
                              : pack_value_pairs<false>(tile, next, asks, head_dim, stride, target);
  } else {
    for (int token = 0; token < kTileTokens; ++token) {
      for (int d = 0; d < stride; d += kWidth) {
        store(target + token * stride + d, load_floats(tile.v(token), d, head_dim));
        if (asks) prefetch(next.v(token) + d);
      }
    }
  }
}

// Turns the first kTokens scores of a row into weights in place and brings the row's running maximum, sum and output up to date.
// If kMasked, scores outside [first, last) count as -infinity. If kPairs, the weights are written as bfloat16.
// `factor` is scale times log2(e).
template <bool kPairs, int kTokens, bool kMasked>
INLINE void softmax_row(float* scores, int first, int last, float factor, const ItemRows& rows, int row) {
  constexpr int kVectors = kTokens / kWidth;
  Reg values[kVectors];
  if constexpr (kMasked) {
    for (int i = 0; i < first; ++i) scores[i] = -__builtin_inff();
    for (int i = 0; i < kVectors; ++i) values[i] = load_first(scores + i * kWidth, last - i * kWidth, -__builtin_inff());
  } else {
    for (int i = 0; i < kVectors; ++i) values[i] = load(scores + i * kWidth);
  }
  Reg highest = values[0];
  for (int i = 1; i < kVectors; ++i) highest = max(highest, values[i]);
  const float old_maximum = rows.maxima[row];
  const float tile_maximum = maximum(highest);
  const float new_maximum = tile_maximum > old_maximum ? tile_maximum : old_maximum;
  float* sums = rows.sums + row * kMaxWidth;
  if (new_maximum != old_maximum) {
    const Reg correction = power_of_two_below(splat((old_maximum - new_maximum) * factor));
    float* output = rows.output + row * rows.output_stride;
    for (int d = 0; d < rows.output_stride; d += kWidth) store(output + d, mul(load(output + d), correction));
    store(sums, mul(load(sums), correction));
    rows.maxima[row] = new_maximum;
  }
  Reg total = load(sums);
  for (int i = 0; i < kVectors; ++i) {
    const Reg exponent = mul(sub(values[i], splat(new_maximum)), splat(factor));
    const Reg weight = softmax_weight<kPairs>(exponent);
    total = add(total, weight);
    if constexpr (kPairs) {
      store(reinterpret_cast<bf16*>(scores) + i * kWidth, weight);
    } else {
      store(scores + i * kWidth, weight);
    }
  }
  store(sums, total);
}

// The same for `num_rows` rows from `row` on, whose scores lie at `scores`, over tokens [tile_first, tile_last) of a tile.
template <bool kPairs, int kTokens>
static void softmax_tokens(float* scores, int tile_begin, int tile_first, int tile_last, float factor, const ItemRows& rows, int row,
                           int num_rows) {
  if (rows.begin(row + num_rows - 1) <= tile_begin && tile_first == 0 && rows.end(row) >= tile_begin + kTokens && tile_last >= kTokens) {
    for (int i = 0; i < num_rows; ++i)
      softmax_row<kPairs, kTokens, false>(scores + i * kTileTokens, 0, kTokens, factor, rows, row + i);
    return;
  }
  for (int i = 0; i < num_rows; ++i) {
    const std::int64_t begin = rows.begin(row + i) - tile_begin;
    const std::int64_t end = rows.end(row + i) - tile_begin;
    const int first = begin < tile_first ? tile_first : begin < tile_last ? static_cast<int>(begin) : tile_last;
    const int last = end < tile_first ? tile_first : end < tile_last ? static_cast<int>(end) : tile_last;
    softmax_row<kPairs, kTokens, true>(scores + i * kTileTokens, first, last, factor, rows, row + i);
  }
}

// `tokens`, a multiple of kMaxWidth, are those up to the last that any of the rows sees.
template <bool kPairs>
static void softmax_rows(float* scores, int tokens, int tile_begin, int first, int last, float factor, const ItemRows& rows, int row,
                         int num_rows) {
  switch (tokens / kMaxWidth) {
    case 1: return softmax_tokens<kPairs, kMaxWidth>(scores, tile_begin, first, last, factor, rows, row, num_rows);
    case 2: return softmax_tokens<kPairs, 2 * kMaxWidth>(scores, tile_begin, first, last, factor, rows, row, num_rows);
    case 3: return softmax_tokens<kPairs, 3 * kMaxWidth>(scores, tile_begin, first, last, factor, rows, row, num_rows);
    default: return softmax_tokens<kPairs, kTileTokens>(scores, tile_begin, first, last, factor, rows, row, num_rows);
  }
}

#include "attention/attention_in_place.inl"

template <class T, class P>
static void attend_packed(const AttentionCall& call, const AttentionItem& item, const AttentionItem* following, const ItemRows& rows,
                          const float* query, int query_stride, float* scores, float* packed) {
  constexpr Operands kOperands = kOperandsOf<T, P>;
  constexpr bool kPairs = kOperands == Operands::kPairs;        // queries and weights of softmax, too
  constexpr bool kPacksPairs = kOperands != Operands::kFloats;  // K and V
  const TileSession<kPairs> session;
  const int num_words = kPacksPairs ? call.head_dim / 2 : call.head_dim;
  // V takes K's place where all rows are done with K by then.
  float* values = rows.count <= kAttendRows<kPairs> ? packed : packed + padded(num_words, kMaxWidth) * kTileTokens;
  TileRows<P> tiles[2];
  const float factor = call.scale * kLog2E * call.key_scale(item.kv_head);
  int begin = first_tile(item);
  locate_tile(call, item, begin, tiles[0]);
  prefetch_tile(tiles[0], call.head_dim);
  // Rows of the next tile are asked for where it takes least time from the rest: spread over the first products, if pairs are widened there;
  // with each of their steps, if these are dot products and the rows short; else in both packings.
  const int row_bytes = call.head_dim * static_cast<int>(sizeof(P));
  const bool in_products =
      kOperands == Operands::kWidened || (kPairs && !kWholeItems<kPairs> && row_bytes <= kShortRowBytes);
  const int first_rows = rows.count < kAttendRows<kPairs> ? rows.count : kAttendRows<kPairs>;
  const int steps = matmul_steps<kOperands>(num_words, first_rows, kTileTokens) +
                    matmul_steps<kOperands>(kPacksPairs ? kTileTokens / 2 : kTileTokens, first_rows, rows.output_stride);
  for (int index = 0; begin < item.kv_end; begin += kTileTokens, index ^= 1) {
    const TileRows<P>& tile = tiles[index];
    TileRows<P>& next = tiles[index ^ 1];
    locate_next_tile(call, item, following, begin, next);
    RowsAhead ahead(next.rows, in_products ? 2 * kTileTokens : 0, row_bytes, steps, kPairs);
    pack_keys<kPacksPairs>(tile, next, !in_products, num_words, packed);
    bool has_values = false;  // packed late: what both packings ask for ahead, if they do, should not come at once
    for (int row = 0; row < rows.count; row += kAttendRows<kPairs>) {
      const int num_rows = rows.count - row < kAttendRows<kPairs> ? rows.count - row : kAttendRows<kPairs>;
      const std::int64_t end = rows.end(row + num_rows - 1) - begin;
      const int last = end < tile.last ? static_cast<int>(end) : tile.last;
      if (last <= tile.first || rows.begin(row) - begin >= last) continue;
      const int tokens = kWholeItems<kPairs> ? kTileTokens : padded(last, kMaxWidth);
      const Matmul score{num_words, query + row * query_stride, query_stride, packed, kTileTokens, scores, kTileTokens, false};
      matmul<kOperands>(score, num_rows, tokens, ahead);
      softmax_rows<kPairs>(scores, tokens, begin, tile.first, last, factor, rows, row, num_rows);
      if (!has_values) pack_values<kPacksPairs>(tile, next, !in_products, call.head_dim, rows.output_stride, values);
      has_values = true;
      const int depth = kPacksPairs ? tokens / 2 : tokens;
      const Matmul output{depth, scores, kTileTokens, values, rows.output_stride, rows.output + row * rows.output_stride,
                          rows.output_stride, true};
      matmul<kOperands>(output, num_rows, rows.output_stride, ahead);
    }
  }
}

static void clear_rows(const ItemRows& rows) {
  for (int i = 0; i < rows.count * rows.output_stride; ++i) rows.output[i] = 0.0f;
  for (int i = 0; i < rows.count * kMaxWidth; ++i) rows.sums[i] = 0.0f;
  for (int row = 0; row < rows.count; ++row) rows.maxima[row] = -3.402823466e38f;  // finite: a row may see nothing of a tile, or of a chunk
}

static void store_partial(const AttentionCall& call, const AttentionItem& item, const ItemRows& rows, int row, float* slot) {
  slot[0] = rows.maxima[row] * call.scale * kLog2E * call.key_scale(item.kv_head);
  slot[1] = sum(load(rows.sums + row * kMaxWidth));
  const float* source = rows.output + row * rows.output_stride;
  for (int d = 0; d < rows.output_stride; d += kWidth) store(slot + kMaxWidth + d, load(source + d));
}

// Joins the result of the next chunk to that of all before it. A chunk of which nothing is seen does not change the result.
static void join_partial(float* slot, const float* next, int head_dim) {
  const float highest = next[0] > slot[0] ? next[0] : slot[0];
  const Reg weight = power_of_two_below(splat(slot[0] - highest));
  const Reg next_weight = power_of_two_below(splat(next[0] - highest));
  float sums[kWidth];
  store(sums, fma(next_weight, splat(next[1]), mul(weight, splat(slot[1]))));
  slot[0] = highest;
  slot[1] = sums[0];
  for (int d = kMaxWidth; d < kMaxWidth + head_dim; d += kWidth)
    store(slot + d, fma(next_weight, load(next + d), mul(weight, load(slot + d))));
}

// Joins what the rows have of a chunk to `slots`, one per row and one more, and clears them for the next one.
static void keep_chunk(const AttentionCall& call, const AttentionItem& item, const ItemRows& rows, bool is_first, float* slots) {
  const int slot_floats = partial_floats(call.head_dim);
  float* newest = slots + rows.count * slot_floats;
  for (int row = 0; row < rows.count; ++row) {
    float* slot = slots + row * slot_floats;
    store_partial(call, item, rows, row, is_first ? slot : newest);
    if (!is_first) join_partial(slot, newest, call.head_dim);
  }
  clear_rows(rows);
}

// Writes the output of one query head of a group, whose weights add up to `row_sum`.
template <class T>
static void store_output(const AttentionCall& call, int kv_head, std::int64_t token, int head, const float* source, float row_sum) {
  const std::int64_t group = call.num_heads / call.num_kv_heads;
  T* target = static_cast<T*>(call.output) + (token * call.num_heads + kv_head * group + head) * call.head_dim;
  const Reg inverse = splat(call.value_scale(kv_head) / row_sum);
  int d = 0;
  for (; d + kWidth <= call.head_dim; d += kWidth) store(target + d, mul(load(source + d), inverse));
  if (d < call.head_dim) store_n(target + d, mul(load(source + d), inverse), call.head_dim - d);
}

// The part of an item from position `begin` to the end of its chunk.
static AttentionItem part_from(const AttentionItem& item, std::int32_t begin) {
  const std::int32_t chunk_end = (begin / kChunkTokens + 1) * kChunkTokens;
  AttentionItem part = item;
  part.kv_begin = begin;
  part.kv_end = item.kv_end < chunk_end ? item.kv_end : chunk_end;
  return part;
}

template <class T, class P>
static void attend_item(const AttentionCall& call, const AttentionItem& item, const AttentionItem* following, float* scratch) {
  const int group = call.num_heads / call.num_kv_heads;
  const int count = item.num_queries * group;
  const int padded_count = padded(count, kMaxWidth);  // a matrix unit may touch whole tiles of rows
  const int stride = padded(call.head_dim, kMaxWidth);
  const int slot_floats = partial_floats(call.head_dim);
  float* query = scratch;
  float* scores = query + padded_count * stride;
  float* output = scores + padded_count * kTileTokens;
  float* packed = output + padded_count * stride;
  float* sums = packed + 2 * kTileTokens * stride;
  float* maxima = sums + count * kMaxWidth;
  float* slots = maxima + count;
  const std::int64_t query_len = call.query_start_loc[item.sequence + 1] - call.query_start_loc[item.sequence];
  const std::int64_t first_position = call.seq_lens[item.sequence] - query_len + item.first_query;
  const ItemRows rows{count, group, first_position, call.window, maxima, sums, output, stride};
  copy_queries<T>(call, item, rows, query, stride);
  clear_rows(rows);
  // Few rows sum in another order anyway, and take all chunks in one.
  const bool is_single = count <= kMaxDotRows || part_from(item, item.kv_begin).kv_end == item.kv_end;
  switch (count) {
    case 1: attend_in_place<T, P, 1>(call, item, following, rows, query, stride, scores); break;
    case 2: attend_in_place<T, P, 2>(call, item, following, rows, query, stride, scores); break;
    case kMaxDotRows: attend_in_place<T, P, kMaxDotRows>(call, item, following, rows, query, stride, scores); break;
    default:
      for (std::int32_t begin = item.kv_begin; begin < item.kv_end;) {
        const AttentionItem part = part_from(item, begin);
        const AttentionItem next = part_from(item, part.kv_end);
        attend_packed<T, P>(call, part, part.kv_end < item.kv_end ? &next : following, rows, query, stride, scores, packed);
        if (!is_single) keep_chunk(call, item, rows, begin == item.kv_begin, slots);
        begin = part.kv_end;
      }
  }
  const std::int64_t first_token = call.query_start_loc[item.sequence] + item.first_query;
  for (int row = 0; row < count; ++row) {
    if (item.partial >= 0) {
      store_partial(call, item, rows, row, call.partials + (item.partial + row) * slot_floats);
      continue;
    }
    const float* slot = slots + row * slot_floats;
    const float* result = is_single ? output + row * stride : slot + kMaxWidth;
    const float row_sum = is_single ? sum(load(sums + row * kMaxWidth)) : slot[1];
    store_output<T>(call, item.kv_head, first_token + row / group, row % group, result, row_sum);
  }
}

// Joins the chunks of a decode query in order of position, as a prefill does: the same sum whatever the number of threads.
template <class T>
static void merge_item(const AttentionCall& call, const MergeItem& item) {
  const int group = call.num_heads / call.num_kv_heads;
  const int slot_floats = partial_floats(call.head_dim);
  for (int head = 0; head < group; ++head) {
    float* slot = call.partials + (item.partial + head) * slot_floats;
    for (std::int64_t chunk = 1; chunk < item.num_chunks; ++chunk) join_partial(slot, slot + chunk * group * slot_floats, call.head_dim);
    store_output<T>(call, item.kv_head, item.token, head, slot + kMaxWidth, slot[1]);
  }
}
