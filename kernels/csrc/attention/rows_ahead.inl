// Rows of memory that are asked for before they are needed: blocks of the pool lie apart, and no hardware prefetcher finds the next one.

INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

INLINE void prefetch_row(const void* row, int bytes) {
  for (int byte = 0; byte < bytes; byte += 64) prefetch(static_cast<const char*>(row) + byte);
}

// Asks for rows a few at a time, with the steps of what is computed meanwhile. A processor waits for a limited number of lines at once: one
// that asks for a whole tile stands still until most of it is there.
class RowsAhead {
 public:
  // `count` is a power of two, or none. All rows are asked for within `steps` steps: spread over all of them, or with `soon` from the first
  // step on, with every step.
  RowsAhead(const void* const* rows, int count, int row_bytes, int steps, bool soon) : rows_(rows), left_(count), row_bytes_(row_bytes) {
    while (rows_per_time_ < count && rows_per_time_ * steps < count) rows_per_time_ *= 2;
    if (!soon && count > 0) period_ = wait_ = steps * rows_per_time_ / count;
  }

  bool done() const { return left_ == 0; }

  void step() {
    if (--wait_ > 0 || left_ == 0) return;
    wait_ = period_;
    for (int i = 0; i < rows_per_time_; ++i) prefetch_row(rows_[i], row_bytes_);
    rows_ += rows_per_time_;
    left_ -= rows_per_time_;
  }

 private:
  const void* const* rows_;
  int left_;
  int row_bytes_;
  int rows_per_time_ = 1;
  int period_ = 1;  // steps from one time to the next
  int wait_ = 1;
};

struct NothingAhead {
  void step() {}
};
