// Finds the rows of a KV tile in the pool, which attention packs or reads, and prefetches.

// The row that a tile has in place of tokens that do not exist. A masked load that reads nothing would do as well, but where it has no valid
// address processors take it for a fault first, which costs hundreds of cycles.
template <class P>
alignas(64) inline constexpr P kZeroRow[kMaxHeadDim]{};

// One KV tile: pointers to the rows of tokens [first, last) of it, and to zeros for the others.
template <class P>
struct TileRows {
  const void* rows[2 * kTileTokens];  // K, then V
  int first;
  int last;

  const P* k(int token) const { return static_cast<const P*>(rows[token]); }
  const P* v(int token) const { return static_cast<const P*>(rows[kTileTokens + token]); }
  void set(int token, const P* k, const P* v) {
    rows[token] = k;
    rows[kTileTokens + token] = v;
  }
};

// Returns where the first tile of an item begins.
inline int first_tile(const AttentionItem& item) { return item.kv_begin / kTileTokens * kTileTokens; }

// A tile that begins behind the item's end has no rows.
template <class P>
static void locate_tile(const AttentionCall& call, const AttentionItem& item, int tile_begin, TileRows<P>& tile) {
  const P* pool = static_cast<const P*>(call.pool) + item.kv_head * call.head_stride;
  const std::int32_t* table = call.block_tables + item.sequence * call.table_stride;
  const int left = item.kv_end > tile_begin ? item.kv_end - tile_begin : 0;
  tile.first = item.kv_begin > tile_begin ? item.kv_begin - tile_begin : 0;
  tile.last = left < kTileTokens ? left : kTileTokens;
  for (int token = 0; token < tile.first; ++token) tile.set(token, kZeroRow<P>, kZeroRow<P>);
  for (int token = tile.last; token < kTileTokens; ++token) tile.set(token, kZeroRow<P>, kZeroRow<P>);
  int index = (tile_begin + tile.first) / call.block_size;
  int offset = (tile_begin + tile.first) % call.block_size;
  for (int token = tile.first; token < tile.last; ++index, offset = 0) {
    const P* k = pool + table[index] * call.block_stride;
    const P* v = k + static_cast<std::int64_t>(call.block_size) * call.head_dim;
    for (; offset < call.block_size && token < tile.last; ++offset, ++token)
      tile.set(token, k + offset * call.head_dim, v + offset * call.head_dim);
  }
}

// The tile after the one at `tile_begin`: of the item, or the first of the item that follows it, if there is one.
template <class P>
static void locate_next_tile(const AttentionCall& call, const AttentionItem& item, const AttentionItem* following, int tile_begin,
                             TileRows<P>& tile) {
  if (following == nullptr || tile_begin + kTileTokens < item.kv_end) return locate_tile(call, item, tile_begin + kTileTokens, tile);
  locate_tile(call, *following, first_tile(*following), tile);
}

// Asks for all of a tile at once.
template <class P>
static void prefetch_tile(const TileRows<P>& tile, int head_dim) {
  for (int token = tile.first; token < tile.last; ++token) {
    prefetch_row(tile.k(token), head_dim * static_cast<int>(sizeof(P)));
    prefetch_row(tile.v(token), head_dim * static_cast<int>(sizeof(P)));
  }
}
