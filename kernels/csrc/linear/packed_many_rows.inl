// Products of many bfloat16 rows with packed weights (packed_linear.h), in vectors. A block of rows, whose sums fill the registers, passes
// through a part of a panel's inputs before the next block does. Between two parts sums lie in scratch memory as they are, so that every
// result is to the bit that of `multiply_packed` for few rows.

#if PAGED_BF16_DOT
inline constexpr int kManyRowsBlock = kMostPartRows;
inline constexpr int kPartPasses = 1;

// Rows `rows` of x with `steps` times 32 inputs of a panel, added to `from` (null: to zeros).
static void multiply_block(const PackedCall& call, RowSpan rows, std::int64_t input, const std::uint8_t* weights, std::int64_t steps,
                           const float* from, float* to, const AskAhead& ask) {
  const bf16* x = call.x + rows.begin * call.x_stride + input;
  multiply_part<false>({x, call.x_stride, weights, steps, from, to, ask}, rows.end - rows.begin);
}
#else
#include "linear/packed_part_wide.inl"
#endif

// Inputs of a part, at most: of so few the nearest cache holds a panel's weights beside rows. From so many rows on a part is longer, as the
// second level holds it. They compute for so long that reading weights from there costs nothing, and sums stay in registers.
inline constexpr std::int64_t kPackedPartInputs = 448;
inline constexpr std::int64_t kLongPartRows = 96;
inline constexpr std::int64_t kLongPartInputs = 5120;

// Rows are multiplied in blocks of nearly the same size: one of few rows would have too few sums to hide the latency of each.
struct ManyRowBlocks {
  RowSpan rows;

  std::int64_t count() const { return (rows.end - rows.begin + kManyRowsBlock - 1) / kManyRowsBlock; }
  std::int64_t begin(std::int64_t block) const { return rows.begin + (rows.end - rows.begin) * block / count(); }
  RowSpan at(std::int64_t block) const { return {begin(block), begin(block + 1)}; }
};

// Stores the results of a block, from its sums and those of its gate, both [rows][kPackedOutputs]: kVectors at a time.
template <int kVectors>
static void store_gated_rows(const PackedCall& call, RowSpan rows, std::int64_t output, const float* gate, const float* sums) {
  constexpr int kRows = kVectors / kPackedRegs;
  const std::int64_t size = call.stored_outputs();
  const auto take = [&](const float* from, std::int64_t first, Reg(&to)[kVectors]) {
    for (int i = 0; i < kVectors; ++i) {
      const Reg value = load(from + i * kWidth);
      to[i] = rounded_to<bf16>(call.bias == nullptr ? value : add(value, load(call.bias + first + i % kPackedRegs * kWidth)));
    }
  };
  for (std::int64_t row = rows.begin; row < rows.end; row += kRows, gate += kRows * kPackedOutputs, sums += kRows * kPackedOutputs) {
    Reg products[kVectors], factors[kVectors];
    take(gate, output, products);
    take(sums, size + output, factors);
    silu_mul<bf16>(products, factors);
    for (int i = 0; i < kVectors; ++i) store(call.out + (row + i / kPackedRegs) * size + output + i % kPackedRegs * kWidth, products[i]);
  }
}

static void store_gated(const PackedCall& call, RowSpan rows, std::int64_t output, const float* gate, const float* sums) {
  constexpr int kVectors = kPackedRegs > 4 ? kPackedRegs : 4;
  constexpr std::int64_t kRows = kVectors / kPackedRegs;
  const std::int64_t whole = (rows.end - rows.begin) / kRows * kRows;
  const RowSpan rest{rows.begin + whole, rows.end};
  store_gated_rows<kVectors>(call, {rows.begin, rest.begin}, output, gate, sums);
  store_gated_rows<kPackedRegs>(call, rest, output, gate + whole * kPackedOutputs, sums + whole * kPackedOutputs);
}

// Stores the results of a block from its sums, [rows][kPackedOutputs], before which lie those of the gate if the call is gated.
static void store_block(const PackedCall& call, RowSpan rows, std::int64_t output, const float* sums) {
  const std::int64_t num_rows = rows.end - rows.begin;
  if (call.gated) return store_gated(call, rows, output, sums, sums + num_rows * kPackedOutputs);
  for (std::int64_t row = 0; row < num_rows; ++row)
    for (int j = 0; j < kPackedRegs; ++j)
      store_packed(call, rows.begin + row, output + j * kWidth, load(sums + row * kPackedOutputs + j * kWidth));
}

// Inputs [begin, end) of a panel, and if the call is gated of the one that it gates.
struct PanelPart {
  std::int64_t panel;
  std::int64_t begin;
  std::int64_t end;
};

// Where the weights of a part begin: `side` 1 is what the panel gates.
static const std::uint8_t* weights_at(const PackedCall& call, const PanelPart& part, int side) {
  const std::int64_t panel = part.panel + side * call.gated_apart;
  return reinterpret_cast<const std::uint8_t*>(call.packed + (panel * call.padded_inputs() + part.begin) * kPackedOutputs);
}

// Multiplies all blocks with a part, and asks for the `next` one meanwhile.
static void multiply_panel_part(const PackedCall& call, const ManyRowBlocks& blocks, const PanelPart& part, const PanelPart& next,
                                float* scratch) {
  const bool is_first = part.begin == 0;
  const bool is_last = part.end == call.padded_inputs();
  const int num_sides = call.gated ? 2 : 1;
  const std::int64_t steps = (part.end - part.begin) / kPackedInputs;
  const std::int64_t quarter = steps * kPackedOutputs * kPackedInputs * 2 / 4;
  // The first block brings weights into the nearest cache: what is asked for beside that slows it down. Of two, the other is too short to
  // ask for all of the next part.
  const std::int64_t first_asking = blocks.count() > 2 ? 1 : 0;
  const std::int64_t all_steps = (blocks.count() - first_asking) * steps * kPartPasses;
  const auto lines = static_cast<int>((quarter / 64 + all_steps - 1) / all_steps);
  for (std::int64_t block = 0; block < blocks.count(); ++block) {
    const RowSpan rows = blocks.at(block);
    const std::int64_t asked = block < first_asking ? quarter : (block - first_asking) * steps * kPartPasses * lines * 64;
    // Sums that are complete at once take the same place for every block.
    float* sums = scratch + (is_first && is_last ? 0 : (rows.begin - blocks.rows.begin) * num_sides * kPackedOutputs);
    for (int side = 0; side < num_sides; ++side) {
      float* to = sums + side * (rows.end - rows.begin) * kPackedOutputs;
      const AskAhead ask{weights_at(call, next, side) + asked, quarter, asked < quarter ? lines : 0};
      multiply_block(call, rows, part.begin, weights_at(call, part, side), steps, is_first ? nullptr : to, to, ask);
    }
    if (is_last) store_block(call, rows, part.panel * kPackedOutputs, sums);
  }
}

static void multiply_packed_many(const PackedCall& call, RowSpan rows, RowSpan panels, std::int64_t /*group*/, float* scratch) {
  const std::int64_t inputs = call.padded_inputs();
  const std::int64_t longest = rows.end - rows.begin < kLongPartRows ? kPackedPartInputs : kLongPartInputs;
  const std::int64_t num_parts = (inputs + longest - 1) / longest;
  const std::int64_t length = (inputs / kPackedInputs + num_parts - 1) / num_parts * kPackedInputs;
  const ManyRowBlocks blocks{rows};
  for (std::int64_t panel = panels.begin; panel < panels.end; ++panel) {
    for (std::int64_t begin = 0; begin < inputs; begin += length) {
      const std::int64_t end = begin + length < inputs ? begin + length : inputs;
      const PanelPart next = end < inputs ? PanelPart{panel, end, inputs} : PanelPart{panel + 1, 0, inputs};
      multiply_panel_part(call, blocks, {panel, begin, end}, next, scratch);
    }
  }
}
