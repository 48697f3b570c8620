// Products in integers: x as whole numbers, in the form that the processor's dot products of integers take. Each group of a row has its own
// scale.

// The first `count` elements, of which there may be fewer than none or more than a vector's, and zeros.
template <class T>
INLINE Reg load_padded(const T* x, int count) {
  return count >= kWidth ? load(x) : count > 0 ? load_n(x, count) : splat(0.0f);
}

#if PAGED_BYTE_DOT
#include "quantized/quantized_digits.inl"
#else
#include "quantized/quantized_words.inl"
#endif

template <class T>
static void prepare_group(const QuantizedCall& call, const T* x, int count, std::int64_t row, std::int64_t group) {
  Reg largest = splat(0.0f);
  Reg nan = splat(0.0f);
  for (int i = 0; i < count; i += kWidth) {
    const Reg value = load_padded(x + i, count - i);
    largest = max(largest, magnitude(value));
    nan = fma(value, splat(0.0f), nan);  // NaN for infinities and NaNs
  }
  const float limit = maximum(largest);
  const float poison = sum(nan);
  constexpr float kSmallest = 1e-30f;  // below it the inverse would not be finite
  const bool usable = limit > kSmallest && poison == 0.0f;
  const std::int32_t total = prepare_whole(call, x, count, usable ? kLargestWhole / limit : 0.0f, row, group);
  const std::int64_t slot = row * call.num_groups + group;
  call.input_scales[slot] = poison != poison ? poison : usable ? limit / kLargestWhole : 0.0f;
  call.offsets[slot] = total * (call.zeros != nullptr ? 1 : call.bits == 8 ? 128 : 8);
}

template <class T>
static void prepare_integers(const QuantizedCall& call, const T* x, std::int64_t row) {
  for (std::int64_t group = 0; group < call.num_groups; ++group) {
    const std::int64_t begin = group * call.group_size;
    const std::int64_t left = call.num_inputs - begin;
    prepare_group(call, x + begin, left < call.group_size ? static_cast<int>(left) : call.group_size, row, group);
  }
}
