// Rows of memory that are asked for before they are needed: blocks of the pool lie apart, and no hardware prefetcher finds the next one.

INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

INLINE void prefetch_row(const void* row, int bytes) {
  for (int byte = 0; byte < bytes; byte += 64) prefetch(static_cast<const char*>(row) + byte);
}

// Asks for rows a few at a time, with every step of what is computed meanwhile. A processor waits for a limited number of lines at once:
// one that asks for a whole tile stands still until most of it is there.
class RowsAhead {
 public:
  // `count` is a power of two, or none. All rows are asked for within `steps` steps.
  RowsAhead(const void* const* rows, int count, int row_bytes, int steps) : rows_(rows), left_(count), row_bytes_(row_bytes) {
    while (rows_per_step_ < count && rows_per_step_ * steps < count) rows_per_step_ *= 2;
  }

  bool done() const { return left_ == 0; }

  void step() {
    if (left_ == 0) return;
    for (int i = 0; i < rows_per_step_; ++i) prefetch_row(rows_[i], row_bytes_);
    rows_ += rows_per_step_;
    left_ -= rows_per_step_;
  }

 private:
  const void* const* rows_;
  int left_;
  int row_bytes_;
  int rows_per_step_ = 1;
};

struct NothingAhead {
  void step() {}
};
