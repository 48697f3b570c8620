// Weights of tokens, kTokenGroup at a time.

// The largest of `count` logits, up to kTokenGroup, if none is a NaN.
static float largest_logit(const float* logits, int count) {
  constexpr int kVectors = 4;
  Reg largest[kVectors];
  for (Reg& one : largest) one = splat(-__builtin_inff());
  for (int first = 0; first < count; first += kVectors * kWidth) {
    for (int i = 0; i < kVectors; ++i) {
      const int at = first + i * kWidth;
      largest[i] = max(largest[i], at + kWidth <= count ? load(logits + at) : load_first(logits + at, count - at, -__builtin_inff()));
    }
  }
  return maximum(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
}

static float weigh_tokens(const ScaledLogits& scaled, const float* logits, int count, float farthest, float* distances, float* weights) {
  constexpr int kVectors = 4;
  static_assert(kTokenGroup % (kVectors * kWidth) == 0);
  const Reg largest = splat(scaled.largest);
  const Reg temperature = splat(scaled.temperature);
  Reg sums[kVectors];
  for (Reg& one : sums) one = splat(0.0f);
  for (int first = 0; first < kTokenGroup; first += kVectors * kWidth) {
    Reg distance[kVectors], weight[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      const int at = first + i * kWidth;
      const Reg logit = at + kWidth <= count ? load(logits + at) : load_first(logits + at, count - at, -__builtin_inff());
      weight[i] = distance[i] = div(sub(largest, logit), temperature);
      store(distances + at, distance[i]);
    }
    exponentials_of_negated(weight);
    for (int i = 0; i < kVectors; ++i) {
      weight[i] = zero_below(sub(splat(farthest), distance[i]), 0.0f, weight[i]);
      store(weights + first + i * kWidth, weight[i]);
      sums[i] = add(sums[i], weight[i]);
    }
  }
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}
