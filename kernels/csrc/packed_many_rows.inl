// Products of many bfloat16 rows with packed weights (packed_linear.h) on the tile matrix unit: 32 rows with a panel at a time, whose sums
// fill four tiles. Inputs are cut into parts: a panel's part stays in the nearest cache while all rows go by, which are read past that
// cache so that they do not push it out. Between two parts sums lie in scratch memory as they are, so that every result is to the bit that
// of `multiply_packed` for few rows.

#if PAGED_AMX
// Finished sums of a panel that are still to be rounded and stored: a few rows at a time between the products of the next block, which keep
// the matrix unit busy and little else.
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
        store_row(biased(sums_, output_), biased(sums_ + kWidth, output_ + kWidth));
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

  static Reg round(Reg value) { return widen_bf16(narrow_bf16(value)); }

  // Of a whole panel.
  void store_row(Reg low, Reg high) {
    const std::int64_t size = call_.stored_outputs();
    bf16* target = call_.out + row_ * size + output_;
    if (call_.out_in_tiles) target += (kTileSize - 1) * output_ - row_ % kTileSize * (size - kPackedOutputs);
    _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }

  void store_gated() {
    const std::int64_t half = call_.num_outputs / 2;
    Reg products[kPackedRegs];
    for (int j = 0; j < kPackedRegs; ++j) {
      const Reg gate = round(biased(gate_ + j * kWidth, output_ + j * kWidth));
      const Reg up = round(biased(sums_ + j * kWidth, half + output_ + j * kWidth));
      products[j] = silu_mul<bf16>(gate, up);
    }
    gate_ += kPackedOutputs;
    store_row(products[0], products[1]);
  }

  const PackedCall& call_;
  const float* sums_ = nullptr;
  const float* gate_ = nullptr;
  std::int64_t output_ = 0;
  std::int64_t row_ = 0;
  int left_ = 0;
};

// What a block does besides its products, step by step.
struct BesideProducts {
  const std::uint8_t* ahead;  // weights that are needed next
  std::int64_t quarter;       // bytes of them in each of four places, which are asked for in turn (see ask_for_next_pages)
  int lines;                  // of each to ask for in a step
  int rows;                   // of `pending` to store in a step
  PendingRows* pending;
};

// Rows [row, row + 16 kTiles) of x with `steps` times 32 inputs of a panel, added to `from` (null: to zeros).
template <int kTiles>
static void multiply_packed_part(const PackedCall& call, std::int64_t row, std::int64_t input, const std::uint8_t* weights, std::int64_t steps,
                                 const float* from, float* to, BesideProducts beside) {
  constexpr int kStride = 4 * kPackedOutputs;
  SixteenRows first = sixteen_rows(call, row, input), second = sixteen_rows(call, row + (kTiles - 1) * kTileSize, input);
  // Not every compiler knows that tile loads read memory and tile stores write it.
  asm volatile("" ::: "memory");
  if (from == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTiles == 2) _tile_zero(2);
    if constexpr (kTiles == 2) _tile_zero(3);
  } else {
    _tile_loadd(0, from, kStride);
    _tile_loadd(1, from + kTileSize, kStride);
    if constexpr (kTiles == 2) _tile_loadd(2, from + kTileSize * kPackedOutputs, kStride);
    if constexpr (kTiles == 2) _tile_loadd(3, from + kTileSize * kPackedOutputs + kTileSize, kStride);
  }
  for (std::int64_t step = 0; step < steps; ++step, weights += kTileSize * kStride) {
    for (int line = 0; line < beside.lines; ++line, beside.ahead += 64) {
      for (int place = 0; place < 4; ++place) __builtin_prefetch(beside.ahead + place * beside.quarter, 0, 2);
    }
    _tile_stream_loadd(4, first.data, first.bytes);
    _tile_loadd(6, weights, kStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 64, kStride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTiles == 2) {
      _tile_stream_loadd(5, second.data, second.bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    first.data += first.step;
    second.data += second.step;
    beside.pending->advance(beside.rows);
  }
  _tile_stored(0, to, kStride);
  _tile_stored(1, to + kTileSize, kStride);
  if constexpr (kTiles == 2) _tile_stored(2, to + kTileSize * kPackedOutputs, kStride);
  if constexpr (kTiles == 2) _tile_stored(3, to + kTileSize * kPackedOutputs + kTileSize, kStride);
  asm volatile("" ::: "memory");
}

// Where the sums of panels lie: in turn in one place more than a group has, since those of the last one may be pending still.
struct SumsRing {
  float* data;
  std::int64_t panel_floats;
  std::int64_t num_panels;
  std::int64_t next;

  float* at(std::int64_t index) const { return data + (next + index) % num_panels * panel_floats; }
};

// Rows `rows` with panels [begin, end), part by part; where the call is gated, the gate's panels, with as many of what they gate.
static void multiply_packed_group(const PackedCall& call, RowSpan rows, RowSpan panels, SumsRing& ring, PendingRows& pending) {
  constexpr std::int64_t kBlockRows = 2 * kTileSize;
  constexpr std::int64_t kBlockFloats = kBlockRows * kPackedOutputs;
  const std::int64_t inputs = call.padded_inputs();
  const std::int64_t num_parts = (inputs + kPackedPartInputs - 1) / kPackedPartInputs;
  const std::int64_t part = (inputs / kPackedInputs + num_parts - 1) / num_parts * kPackedInputs;
  const std::int64_t num_rows = rows.end - rows.begin;
  const std::int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
  const std::int64_t num_sides = call.gated ? 2 : 1;
  const std::int64_t num_turns = (panels.end - panels.begin) * num_sides;  // through all rows, in each part
  const auto weights_of = [&](std::int64_t index, std::int64_t input) {
    const std::int64_t panel = panels.begin + index / num_sides + index % num_sides * (call.num_outputs / kPackedOutputs / 2);
    return reinterpret_cast<const std::uint8_t*>(call.packed + (panel * inputs + input) * kPackedOutputs);
  };
  for (std::int64_t input = 0; input < inputs; input += part) {
    const std::int64_t depth = inputs - input < part ? inputs - input : part;
    const std::int64_t steps = depth / kPackedInputs;
    const bool is_last = input + depth == inputs;
    const std::int64_t all_steps = num_blocks * steps;
    const std::int64_t quarter = steps * kPackedOutputs * kPackedInputs * 2 / 4;
    const auto lines_per_step = static_cast<int>((quarter / 64 + all_steps - 1) / all_steps);
    // What is pending comes from one panel, and all turns of a gate or the last part's of others are there to store it.
    const std::int64_t until_next = all_steps * num_sides * (num_turns == num_sides ? num_parts : 1);
    const auto rows_per_step = static_cast<int>((num_rows + until_next - 1) / until_next);
    for (std::int64_t index = 0; index < num_turns; ++index) {
      const std::uint8_t* weights = weights_of(index, input);
      const std::uint8_t* next = index + 1 < num_turns ? weights_of(index + 1, input) : is_last ? weights_of(num_turns, 0) : weights_of(0, input + depth);
      float* sums = ring.at(index);
      for (std::int64_t block = 0; block < num_blocks; ++block) {
        const std::int64_t row = rows.begin + block * kBlockRows;
        const std::int64_t asked = block * steps * lines_per_step * 64;
        const BesideProducts beside{next + asked, quarter, asked < quarter ? lines_per_step : 0, rows_per_step, &pending};
        float* to = sums + block * kBlockFloats;
        const float* from = input == 0 ? nullptr : to;
        if (row + kTileSize < rows.end) {
          multiply_packed_part<2>(call, row, input, weights, steps, from, to, beside);
        } else {
          multiply_packed_part<1>(call, row, input, weights, steps, from, to, beside);
        }
      }
      if (is_last && index % num_sides == num_sides - 1)
        pending.start(sums, call.gated ? ring.at(index - 1) : nullptr, panels.begin + index / num_sides, rows.begin, static_cast<int>(num_rows));
    }
  }
  ring.next = (ring.next + num_turns) % ring.num_panels;
}

static void multiply_packed_many(const PackedCall& call, RowSpan rows, RowSpan panels, std::int64_t group, float* scratch) {
  const TileSession<true> session;
  PendingRows pending(call);
  const std::int64_t num_blocks = (rows.end - rows.begin + 2 * kTileSize - 1) / (2 * kTileSize);
  SumsRing ring{scratch, num_blocks * 2 * kTileSize * kPackedOutputs, (group + 1) * (call.gated ? 2 : 1), 0};
  for (std::int64_t first = panels.begin; first < panels.end; first += group) {
    const RowSpan together{first, first + group < panels.end ? first + group : panels.end};
    multiply_packed_group(call, rows, together, ring, pending);
  }
  pending.finish();
}

inline constexpr auto kMultiplyPackedMany = multiply_packed_many;
#else
inline constexpr void (*kMultiplyPackedMany)(const PackedCall&, RowSpan, RowSpan, std::int64_t, float*) = nullptr;
#endif
