// The write of one row into an e4m3 pool.
template <class T>
static void encode_row(const void* row, float inverse_scale, int size, e4m3* target) {
  const T* source = static_cast<const T*>(row);
  float scaled[kMaxHeadDim];
  int d = 0;
  for (; d + kWidth <= size; d += kWidth) store(scaled + d, mul(load(source + d), splat(inverse_scale)));
  if (d < size) store_n(scaled + d, mul(load_n(source + d, size - d), splat(inverse_scale)), size - d);
  for (int i = 0; i < size; ++i) from_float(scaled[i], target[i]);  // without branches: the compiler makes vectors of it
}
