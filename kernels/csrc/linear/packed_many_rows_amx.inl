// Products of many bfloat16 rows with packed weights (packed_linear.h) on the tile matrix unit. Inputs are cut into parts: a panel's part
// stays in the nearest cache while all rows go by. Between two parts sums lie in scratch memory as they are, so that every result is to the bit
// that of `multiply_packed` for few rows.

// Inputs of a part, at most.
inline constexpr std::int64_t kPackedPartInputs = 512;

#include "linear/pending_rows_amx.inl"
#include "linear/packed_part_amx.inl"

// The places of the panels' sums, used in turn. There is one place more than a group has panels, since the sums of the group before may still
// be waiting to be stored.
struct SumsRing {
  float* data;
  std::int64_t panel_floats;
  std::int64_t num_panels;
  std::int64_t next;

  float* at(std::int64_t index) const { return data + (next + index) % num_panels * panel_floats; }
};

// Multiplies `rows` with panels [begin, end), part by part; if the call is gated, with the gate's panels and those that they gate.
static void multiply_packed_group(const PackedCall& call, RowSpan rows, RowSpan panels, SumsRing& ring, PendingRows& pending) {
  const std::int64_t inputs = call.padded_inputs();
  const std::int64_t num_parts = (inputs + kPackedPartInputs - 1) / kPackedPartInputs;
  const std::int64_t part = (inputs / kPackedInputs + num_parts - 1) / num_parts * kPackedInputs;
  const std::int64_t num_rows = rows.end - rows.begin;
  const ManyRowBlocks blocks{num_rows};
  const std::int64_t num_blocks = blocks.count();
  const std::int64_t num_sides = call.gated ? 2 : 1;
  const std::int64_t num_turns = (panels.end - panels.begin) * num_sides;  // through all rows, in each part
  const auto weights_of = [&](std::int64_t index, std::int64_t input) {
    const std::int64_t panel = panels.begin + index / num_sides + index % num_sides * call.gated_apart;
    return reinterpret_cast<const std::uint8_t*>(call.packed + (panel * inputs + input) * kPackedOutputs);
  };
  for (std::int64_t input = 0; input < inputs; input += part) {
    const std::int64_t depth = inputs - input < part ? inputs - input : part;
    const std::int64_t steps = depth / kPackedInputs;
    const bool is_last = input + depth == inputs;
    const std::int64_t all_steps = num_blocks * steps;
    const std::int64_t quarter = steps * kPackedOutputs * kPackedInputs * 2 / 4;
    const auto lines_per_step = static_cast<int>((quarter / 64 + all_steps - 1) / all_steps);
    // The pending rows are those of one panel. They are stored during all turns of a gated call, or those of the last part otherwise.
    const std::int64_t until_next = all_steps * num_sides * (num_turns == num_sides ? num_parts : 1);
    const auto rows_per_step = static_cast<int>((num_rows + until_next - 1) / until_next);
    for (std::int64_t index = 0; index < num_turns; ++index) {
      const std::uint8_t* weights = weights_of(index, input);
      const std::uint8_t* next = index + 1 < num_turns ? weights_of(index + 1, input) : is_last ? weights_of(num_turns, 0) : weights_of(0, input + depth);
      float* sums = ring.at(index);
      for (std::int64_t block = 0; block < num_blocks; ++block) {
        const RowSpan block_rows{rows.begin + blocks.first(block), rows.begin + blocks.first(block + 1)};
        const std::int64_t asked = block * steps * lines_per_step * 64;
        const BesideProducts beside{{next + asked, quarter, asked < quarter ? lines_per_step : 0}, rows_per_step, &pending};
        float* to = sums + blocks.first(block) * kPackedOutputs;
        multiply_many_part(call, block_rows, input, weights, steps, input == 0 ? nullptr : to, to, beside);
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
  const auto panel_floats = static_cast<std::int64_t>(packed_scratch_floats(rows.end - rows.begin, 1));
  SumsRing ring{scratch, panel_floats, (group + 1) * (call.gated ? 2 : 1), 0};
  for (std::int64_t first = panels.begin; first < panels.end; first += group) {
    const RowSpan together{first, first + group < panels.end ? first + group : panels.end};
    multiply_packed_group(call, rows, together, ring, pending);
  }
  pending.finish();
}
