// Row-wise pieces of a decoder layer. Rounding to the element type happens where the unfused operations would round, so that the fused
// ones agree with them; sums are float32.

template <class T>
INLINE Reg rounded_to(Reg value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return rounded(value, T{});
  }
}

// x, or with a residual the sum of both, which is also stored; returns the sum of squares.
template <class T>
static float norm_input(const T* x, const T* residual, T* residual_out, std::int64_t size) {
  Reg squares = splat(0.0f);
  for (std::int64_t i = 0; i < size; i += kWidth) {
    const int count = size - i < kWidth ? static_cast<int>(size - i) : kWidth;
    Reg value = count == kWidth ? load(x + i) : load_n(x + i, count);
    if (residual != nullptr) {
      value = rounded_to<T>(add(value, count == kWidth ? load(residual + i) : load_n(residual + i, count)));
      if (count == kWidth) {
        store(residual_out + i, value);
      } else {
        store_n(residual_out + i, value, count);
      }
    }
    squares = fma(value, value, squares);
  }
  return sum(squares);
}

template <class T>
static void rms_norm_rows(const NormCall& call, RowSpan span) {
  const T* weight = static_cast<const T*>(call.weight);
  for (std::int64_t row = span.begin; row < span.end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    T* out = static_cast<T*>(call.out) + row * call.size;
    const T* source = x;
    float squares;
    if (call.residual != nullptr) {
      T* residual_out = static_cast<T*>(call.residual_out) + row * call.size;
      squares = norm_input(x, static_cast<const T*>(call.residual) + row * call.residual_stride, residual_out, call.size);
      source = residual_out;
    } else {
      squares = norm_input<T>(x, nullptr, nullptr, call.size);
    }
    const Reg factor = splat(1.0f / __builtin_sqrtf(squares / static_cast<float>(call.size) + call.epsilon));
    for (std::int64_t i = 0; i < call.size; i += kWidth) {
      const int count = call.size - i < kWidth ? static_cast<int>(call.size - i) : kWidth;
      if (count == kWidth) {
        store(out + i, mul(rounded_to<T>(mul(load(source + i), factor)), load(weight + i)));
      } else {
        store_n(out + i, mul(rounded_to<T>(mul(load_n(source + i, count), factor)), load_n(weight + i, count)), count);
      }
    }
  }
}

// silu(gate) * up, in place of the gate, with the rounding of the unfused operations but the last.
template <class T, int kVectors>
INLINE void silu_mul(Reg (&gate)[kVectors], const Reg (&up)[kVectors]) {
  Reg denominators[kVectors];
  for (int i = 0; i < kVectors; ++i) denominators[i] = gate[i];
  exponentials_of_negated(denominators);
  for (int i = 0; i < kVectors; ++i) denominators[i] = reciprocal(add(splat(1.0f), denominators[i]));
  for (int i = 0; i < kVectors; ++i) gate[i] = mul(rounded_to<T>(mul(gate[i], denominators[i])), up[i]);
}

template <class T>
static void silu_mul_rows(const SiluMulCall& call, RowSpan span) {
  constexpr int kTogether = 4;
  for (std::int64_t row = span.begin; row < span.end; ++row) {
    const T* gate = static_cast<const T*>(call.gate_up) + row * call.stride;
    const T* up = gate + call.size;
    T* out = static_cast<T*>(call.out) + row * call.size;
    std::int64_t i = 0;
    for (; i + kTogether * kWidth <= call.size; i += kTogether * kWidth) {
      Reg products[kTogether], factors[kTogether];
      for (int j = 0; j < kTogether; ++j) {
        products[j] = load(gate + i + j * kWidth);
        factors[j] = load(up + i + j * kWidth);
      }
      silu_mul<T>(products, factors);
      for (int j = 0; j < kTogether; ++j) store(out + i + j * kWidth, products[j]);
    }
    for (; i < call.size; i += kWidth) {
      const int count = call.size - i < kWidth ? static_cast<int>(call.size - i) : kWidth;
      Reg product[1] = {load_n(gate + i, count)};
      silu_mul<T>(product, {load_n(up + i, count)});
      store_n(out + i, product[0], count);
    }
  }
}

template <class T>
static void rotary_rows(const RotaryCall& call, RowSpan span) {
  for (std::int64_t row = span.begin; row < span.end; ++row) {
    const float* cos = call.cos + row * call.angle_stride;
    const float* sin = call.sin + row * call.angle_stride;
    for (std::int64_t head = 0; head < call.num_heads; ++head) {
      T* low = static_cast<T*>(call.x) + row * call.token_stride + head * call.head_stride;
      T* high = low + call.half;
      for (std::int64_t d = 0; d < call.half; d += kWidth) {
        const int count = call.half - d < kWidth ? static_cast<int>(call.half - d) : kWidth;
        const bool whole = count == kWidth;
        const Reg a = whole ? load(low + d) : load_n(low + d, count);
        const Reg b = whole ? load(high + d) : load_n(high + d, count);
        const Reg c = whole ? load(cos + d) : load_n(cos + d, count);
        const Reg s = whole ? load(sin + d) : load_n(sin + d, count);
        const Reg turned_low = sub(mul(a, c), mul(b, s));
        const Reg turned_high = add(mul(b, c), mul(a, s));
        if (whole) {
          store(low + d, turned_low);
          store(high + d, turned_high);
        } else {
          store_n(low + d, turned_low, count);
          store_n(high + d, turned_high, count);
        }
      }
    }
  }
}
