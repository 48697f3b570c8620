// exp and 2^x in float32, relative error below 3e-7. Exactly 0 for -infinity and everything whose result is not a normal number; NaN
// stays NaN.

// 2^x for x <= 0: x = n + r with |r| <= 1/2, a polynomial in r, times 2^n.
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

// x = n ln 2 + r with |r| <= ln(2) / 2, a polynomial in r, times 2^n; saturates near the largest float.

INLINE Reg exponential(Reg x) {
  constexpr float kLowest = -87.3365f;
  constexpr float kHighest = 88.0f;
  const Reg negated = sub(splat(0.0f), x);
  const Reg bounded = max(splat(kLowest), sub(splat(0.0f), max(splat(-kHighest), negated)));
  const Reg n = round_to_whole(mul(bounded, splat(0x1.715476p0f)));
  Reg r = fma(n, splat(-0x1.62e400p-1f), bounded);  // ln 2 in two parts; the first has few enough bits for n times it to be exact
  r = fma(n, splat(-0x1.7f7d1cp-20f), r);
  Reg p = splat(1.3888889e-3f);
  p = fma(p, r, splat(8.3333333e-3f));
  p = fma(p, r, splat(4.1666668e-2f));
  p = fma(p, r, splat(1.6666667e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return zero_below(x, kLowest, mul(p, power_of_two(n)));
}
