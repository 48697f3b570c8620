// Products with packed weights of 8 or 4 bits; quantized.h has the format. Weights are widened in registers and every group's sum is
// scaled by itself, so that nothing is rounded but inputs that become integers: to 16 bits against the largest of their group, less than
// what bfloat16 has lost already. Float32 inputs are used as they are.

inline constexpr int kPanelRegs = kPanelOutputs / kWidth;

template <int kBits>
inline constexpr std::uint32_t kFlip = kBits == 8 ? 0x80808080u : 0x88888888u;  // unsigned with an offset to two's complement

template <int kBits>
inline constexpr float kOffset = kBits == 8 ? 128.0f : 8.0f;  // that `kFlip` takes off

// Loads the scales of kWidth outputs of a group, from the weight's `at`-th scale on.
INLINE Reg scales_at(const QuantizedCall& call, std::int64_t at) {
  return call.zeros == nullptr ? load(call.scales + at) : load(call.wide_scales + at);
}

// The offset that a flipped value still has.
template <int kBits>
INLINE Reg shifts_at(const QuantizedCall& call, std::int64_t at) {
  return call.zeros == nullptr ? splat(0.0f) : sub(load(call.zeros + at), splat(kOffset<kBits>));
}

template <int kRows>
struct PanelSums {
  Reg values[kRows][kPanelRegs];
};

template <class T, int kRows>
static void store_panel(const QuantizedCall& call, std::int64_t panel, std::int64_t row, const PanelSums<kRows>& sums) {
  const std::int64_t first = panel * kPanelOutputs;
  for (int j = 0; j < kPanelRegs; ++j) {
    const std::int64_t output = first + j * kWidth;
    const std::int64_t left = call.num_outputs - output;
    if (left <= 0) return;
    const int count = left < kWidth ? static_cast<int>(left) : kWidth;
    Reg bias = splat(0.0f);
    if (call.bias != nullptr) {
      const T* source = static_cast<const T*>(call.bias) + output;
      bias = count == kWidth ? load(source) : load_n(source, count);
    }
    for (int r = 0; r < kRows; ++r) {
      T* target = static_cast<T*>(call.out) + (row + r) * call.num_outputs + output;
      if (count == kWidth) {
        store(target, add(sums.values[r][j], bias));
      } else {
        store_n(target, add(sums.values[r][j], bias), count);
      }
    }
  }
}

// Float inputs.

// Adds the products of one quad of a panel's lanes with kRows rows of x; weights of input i of the quad are the field of its byte.
template <int kRows, int kChains, bool kShifted, int kUp, int kDown, int kByte>
INLINE void add_input(Words words, Reg shift, const float* x, std::int64_t stride, Reg (&sums)[kRows][kChains]) {
  const Reg weight = kShifted ? sub(field<kUp, kDown>(words), shift) : field<kUp, kDown>(words);
  for (int r = 0; r < kRows; ++r)
    sums[r][kByte % kChains] = fma(splat(x[r * stride + kByte]), weight, sums[r][kByte % kChains]);
}

template <int kBits, int kRows, int kChains, bool kShifted>
INLINE void add_block(Words words, Reg shift, const float* x, std::int64_t stride, Reg (&sums)[kRows][kChains]) {
  if constexpr (kBits == 8) {
    add_input<kRows, kChains, kShifted, 24, 24, 0>(words, shift, x, stride, sums);
    add_input<kRows, kChains, kShifted, 16, 24, 1>(words, shift, x, stride, sums);
    add_input<kRows, kChains, kShifted, 8, 24, 2>(words, shift, x, stride, sums);
    add_input<kRows, kChains, kShifted, 0, 24, 3>(words, shift, x, stride, sums);
  } else {
    add_input<kRows, kChains, kShifted, 28, 28, 0>(words, shift, x, stride, sums);
    add_input<kRows, kChains, kShifted, 20, 28, 1>(words, shift, x, stride, sums);
    add_input<kRows, kChains, kShifted, 12, 28, 2>(words, shift, x, stride, sums);
    add_input<kRows, kChains, kShifted, 4, 28, 3>(words, shift, x, stride, sums);
    add_input<kRows, kChains, kShifted, 24, 28, 0>(words, shift, x + 4, stride, sums);
    add_input<kRows, kChains, kShifted, 16, 28, 1>(words, shift, x + 4, stride, sums);
    add_input<kRows, kChains, kShifted, 8, 28, 2>(words, shift, x + 4, stride, sums);
    add_input<kRows, kChains, kShifted, 0, 28, 3>(words, shift, x + 4, stride, sums);
  }
}

template <int kBits, int kRows, bool kShifted>
static PanelSums<kRows> multiply_wide(const QuantizedCall& call, std::int64_t panel, std::int64_t row) {
  constexpr int kChains = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;  // several sums in flight hide the latency of each
  constexpr int kBlockInputs = 32 / kBits;
  const std::int64_t stride = call.padded_inputs();
  const std::uint8_t* weights = call.weights + panel * call.panel_bytes();
  std::int64_t at = panel * call.num_groups * kPanelOutputs;
  PanelSums<kRows> totals;
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kPanelRegs; ++j) totals.values[r][j] = splat(0.0f);
  for (std::int64_t group = 0; group < call.num_groups; ++group, at += kPanelOutputs) {
    const float* x = call.wide + row * stride + group * call.group_size;
    const int num_blocks = call.group_size / kBlockInputs;
    for (int j = 0; j < kPanelRegs; ++j) {
      const Reg shift = shifts_at<kBits>(call, at + j * kWidth);
      Reg sums[kRows][kChains];
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kChains; ++c) sums[r][c] = splat(0.0f);
      for (int block = 0; block < num_blocks; ++block) {
        const Words words = load_words(weights + block * 4 * kPanelOutputs + j * 4 * kWidth, kFlip<kBits>);
        add_block<kBits, kRows, kChains, kShifted>(words, shift, x + block * kBlockInputs, stride, sums);
      }
      const Reg scale = scales_at(call, at + j * kWidth);
      for (int r = 0; r < kRows; ++r) {
        for (int c = 1; c < kChains; ++c) sums[r][0] = add(sums[r][0], sums[r][c]);
        totals.values[r][j] = fma(sums[r][0], scale, totals.values[r][j]);
      }
    }
    weights += num_blocks * 4 * kPanelOutputs;
  }
  return totals;
}

template <class T, int kBits, bool kShifted>
static void multiply_wide_panel(const QuantizedCall& call, std::int64_t panel) {
  std::int64_t row = 0;
  for (; row + 4 <= call.num_rows; row += 4) store_panel<T>(call, panel, row, multiply_wide<kBits, 4, kShifted>(call, panel, row));
  for (; row + 2 <= call.num_rows; row += 2) store_panel<T>(call, panel, row, multiply_wide<kBits, 2, kShifted>(call, panel, row));
  if (row < call.num_rows) store_panel<T>(call, panel, row, multiply_wide<kBits, 1, kShifted>(call, panel, row));
}

#if PAGED_INTEGER_DOT
#include "quantized/quantized_integers.inl"
#endif

template <class T>
static void prepare_rows(const QuantizedCall& call, RowSpan span) {
  for (std::int64_t row = span.begin; row < span.end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
#if PAGED_INTEGER_DOT
    if (call.wide == nullptr) {
      prepare_integers(call, x, row);
      continue;
    }
#endif
    float* wide = call.wide + row * call.padded_inputs();
    std::int64_t i = 0;
    for (; i + kWidth <= call.num_inputs; i += kWidth) store(wide + i, load(x + i));
    for (; i < call.num_inputs; ++i) wide[i] = to_float(x[i]);
    for (; i < call.padded_inputs(); ++i) wide[i] = 0.0f;
  }
}

template <class T, int kBits>
static void multiply_span(const QuantizedCall& call, RowSpan span) {
#if PAGED_INTEGER_DOT
  if (call.wide == nullptr) return multiply_integers<T, kBits>(call, span);
#endif
  for (std::int64_t panel = span.begin; panel < span.end; ++panel) {
    if (call.zeros == nullptr) {
      multiply_wide_panel<T, kBits, false>(call, panel);
    } else {
      multiply_wide_panel<T, kBits, true>(call, panel);
    }
  }
}

template <class T>
static void multiply_panels(const QuantizedCall& call, RowSpan span) {
  if (call.bits == 8) {
    multiply_span<T, 8>(call, span);
  } else {
    multiply_span<T, 4>(call, span);
  }
}

// Weights back as rows: lanes are outputs, so kWidth inputs are widened at a time and turned.

template <int kBits>
static void widen_block(Words words, Reg* inputs) {
  if constexpr (kBits == 8) {
    inputs[0] = field<24, 24>(words);
    inputs[1] = field<16, 24>(words);
    inputs[2] = field<8, 24>(words);
    inputs[3] = field<0, 24>(words);
  } else {
    inputs[0] = field<28, 28>(words);
    inputs[1] = field<20, 28>(words);
    inputs[2] = field<12, 28>(words);
    inputs[3] = field<4, 28>(words);
    inputs[4] = field<24, 28>(words);
    inputs[5] = field<16, 28>(words);
    inputs[6] = field<8, 28>(words);
    inputs[7] = field<0, 28>(words);
  }
}

template <class T, int kBits>
static void dequantize_panel(const QuantizedCall& call, std::int64_t panel) {
  constexpr int kBlockInputs = 32 / kBits;
  constexpr int kTurned = kWidth < kBlockInputs ? kBlockInputs : kWidth;  // inputs at a time
  const std::uint8_t* weights = call.weights + panel * call.panel_bytes();
  for (std::int64_t input = 0; input < call.num_inputs; input += kTurned) {
    const std::int64_t at = (panel * call.num_groups + input / call.group_size) * kPanelOutputs;
    for (int j = 0; j < kPanelRegs; ++j) {
      Reg values[kTurned];
      for (int i = 0; i < kTurned; i += kBlockInputs) {
        const std::int64_t block = (input + i) / kBlockInputs;
        widen_block<kBits>(load_words(weights + block * 4 * kPanelOutputs + j * 4 * kWidth, kFlip<kBits>), values + i);
      }
      const Reg scale = scales_at(call, at + j * kWidth);
      const Reg shift = shifts_at<kBits>(call, at + j * kWidth);
      for (int i = 0; i < kTurned; ++i) values[i] = mul(sub(values[i], shift), scale);
      for (int i = 0; i < kTurned; i += kWidth) {
        transpose(values + i);
        const std::int64_t left = call.num_inputs - input - i;
        for (int lane = 0; lane < kWidth; ++lane) {
          const std::int64_t output = panel * kPanelOutputs + j * kWidth + lane;
          if (output >= call.num_outputs || left <= 0) break;
          T* target = static_cast<T*>(call.out) + output * call.num_inputs + input + i;
          if (left >= kWidth) {
            store(target, values[i + lane]);
          } else {
            store_n(target, values[i + lane], static_cast<int>(left));
          }
        }
      }
    }
  }
}

template <class T>
static void dequantize_panels(const QuantizedCall& call, RowSpan span) {
  for (std::int64_t panel = span.begin; panel < span.end; ++panel) {
    if (call.bits == 8) {
      dequantize_panel<T, 8>(call, panel);
    } else {
      dequantize_panel<T, 4>(call, panel);
    }
  }
}
