// Results of products of many bfloat16 rows on their way out of float32 sums (packed_many_rows_amx.inl).

// Finished sums of a panel that are still to be rounded and stored: a few rows at a time between the products that come next, which keep a
// matrix unit busy and little else.
class PendingRows {
 public:
  explicit PendingRows(const PackedCall& call) : call_(call) {}

  // `sums`, and those of its gate where the call is gated: [num_rows][kPackedOutputs].
  void start(const float* sums, const float* gate, std::int64_t panel, std::int64_t row, int num_rows) {
    finish();
    sums_ = sums;
    gate_ = gate;
    output_ = panel * kPackedOutputs;
    row_ = row;
    left_ = num_rows;
  }

  void advance(int num_rows) {
    for (; num_rows > 0 && left_ > 0; --num_rows, --left_, ++row_, sums_ += kPackedOutputs) {
      if (call_.gated) {
        store_gated();
      } else if (output_ + kPackedOutputs <= call_.num_outputs) {
        Reg whole[kPackedRegs];
        for (int j = 0; j < kPackedRegs; ++j) whole[j] = biased(sums_ + j * kWidth, output_ + j * kWidth);
        store_row(whole);
      } else {
        for (int j = 0; j < kPackedRegs; ++j) store_packed(call_, row_, output_ + j * kWidth, load(sums_ + j * kWidth));
      }
    }
  }

  void finish() { advance(left_); }

 private:
  Reg biased(const float* sums, std::int64_t output) const {
    return call_.bias == nullptr ? load(sums) : add(load(sums), load(call_.bias + output));
  }

  void store_row(const Reg (&panel)[kPackedRegs]) {
    const std::int64_t size = call_.stored_outputs();
    bf16* target = call_.out + row_ * size + output_;
    if (call_.out_in_tiles) target += (kTileSize - 1) * output_ - row_ % kTileSize * (size - kPackedOutputs);
    _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(panel[1], panel[0]));
  }

  void store_gated() {
    const std::int64_t half = call_.num_outputs / 2;
    Reg products[kPackedRegs], factors[kPackedRegs];
    for (int j = 0; j < kPackedRegs; ++j) {
      products[j] = rounded_to<bf16>(biased(gate_ + j * kWidth, output_ + j * kWidth));
      factors[j] = rounded_to<bf16>(biased(sums_ + j * kWidth, half + output_ + j * kWidth));
    }
    silu_mul<bf16>(products, factors);
    gate_ += kPackedOutputs;
    store_row(products);
  }

  const PackedCall& call_;
  const float* sums_ = nullptr;
  const float* gate_ = nullptr;
  std::int64_t output_ = 0;
  std::int64_t row_ = 0;
  int left_ = 0;
};

// The work of a block besides its products.
struct BesideProducts {
  AskAhead ask;
  int rows;  // of `pending` to store in a step of 32 inputs
  PendingRows* pending;
};
