// Partial loads and stores for instruction sets without masks, through memory. Loads and stores of the first n < kWidth elements are
// rare: row tails only.

INLINE Reg reciprocal(Reg a) { return div(splat(1.0f), a); }
template <class T>
INLINE Reg rounded(Reg value, T) {
  T buffer[kWidth];
  store(buffer, value);
  return load(buffer);
}
template <class T>
INLINE Reg load_n(const T* source, int n) {
  float buffer[kWidth] = {};
  for (int i = 0; i < n; ++i) buffer[i] = to_float(source[i]);
  return load(buffer);
}
template <class T>
INLINE void store_n(T* target, Reg value, int n) {
  float buffer[kWidth];
  store(buffer, value);
  for (int i = 0; i < n; ++i) from_float(buffer[i], target[i]);
}
INLINE Reg load_first(const float* source, int n, float other) {
  float buffer[kWidth];
  for (int i = 0; i < kWidth; ++i) buffer[i] = i < n ? source[i] : other;
  return load(buffer);
}
INLINE Reg interleave_n(const bf16* low, const bf16* high, int n) {
  std::uint32_t words[kWidth] = {};
  for (int i = 0; i < kWidth && i < n; ++i) words[i] = low[i].bits | static_cast<std::uint32_t>(high[i].bits) << 16;
  Reg result;
  std::memcpy(&result, words, sizeof result);
  return result;
}
