// exp and 2^x in float32, relative error below 3e-7. NaN stays NaN.

// 2^x for x <= 0, exactly 0 for -infinity and everything whose result is not a normal number: x = n + r with |r| <= 1/2, a polynomial in r,
// times 2^n.
INLINE Reg power_of_two_below(Reg x) {
  constexpr float kLowest = -126.0f;
  const Reg bounded = max(splat(kLowest), x);
  const Reg n = round_to_whole(bounded);
  const Reg r = sub(bounded, n);
  Reg p = splat(1.5403530e-4f);
  p = fma(p, r, splat(1.3333558e-3f));
  p = fma(p, r, splat(9.6181291e-3f));
  p = fma(p, r, splat(5.5504109e-2f));
  p = fma(p, r, splat(2.4022651e-1f));
  p = fma(p, r, splat(6.9314718e-1f));
  p = fma(p, r, splat(1.0f));
  return zero_below(x, kLowest, mul(p, power_of_two(n)));
}

// The same for a weight of softmax. With kPairs it is rounded to bfloat16 next, and a relative error below 3e-6 does: n is x rounded down,
// which the instruction that multiplies by 2^n does by itself, and 0 <= r < 1.
template <bool kPairs>
INLINE Reg softmax_weight(Reg x) {
#if PAGED_BF16_DOT
  if constexpr (kPairs) {
    const Reg r = fraction(x);
    Reg p = splat(1.3426686e-2f);
    p = fma(p, r, splat(5.2242472e-2f));
    p = fma(p, r, splat(2.4128021e-1f));
    p = fma(p, r, splat(6.9304484e-1f));
    p = fma(p, r, splat(1.0f));
    return scale_from(x, -126.0f, p);
  }
#endif
  return power_of_two_below(x);
}

// exp(-x) of each of several vectors: -x = n ln 2 + r with |r| <= ln(2) / 2, a polynomial in r, times 2^n; saturates near the smallest
// normal float and near the largest. The vectors take every operation together, because a processor looks ahead over few such chains if they
// come one after another.
template <int kVectors>
INLINE void exponentials_of_negated(Reg (&x)[kVectors]) {
  constexpr float kLowest = -87.3365f;
  constexpr float kHighest = 88.0f;
  constexpr float kCoefficients[] = {8.3333333e-3f, 4.1666668e-2f, 1.6666667e-1f, 0.5f, 1.0f, 1.0f};
  Reg n[kVectors], r[kVectors], p[kVectors];
  for (int i = 0; i < kVectors; ++i) r[i] = max(splat(kLowest), sub(splat(0.0f), max(splat(-kHighest), x[i])));
  for (int i = 0; i < kVectors; ++i) n[i] = round_to_whole(mul(r[i], splat(0x1.715476p0f)));
  for (int i = 0; i < kVectors; ++i) {
    r[i] = fma(n[i], splat(-0x1.62e400p-1f), r[i]);  // ln 2 in two parts; the first has few enough bits for n times it to be exact
    r[i] = fma(n[i], splat(-0x1.7f7d1cp-20f), r[i]);
    p[i] = splat(1.3888889e-3f);
  }
  for (const float coefficient : kCoefficients)
    for (int i = 0; i < kVectors; ++i) p[i] = fma(p[i], r[i], splat(coefficient));
  for (int i = 0; i < kVectors; ++i) x[i] = mul(p[i], power_of_two(n[i]));
}
