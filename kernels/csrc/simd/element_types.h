// Element types of pools and activations. All but float32 are storage only: arithmetic is float32, except for dot products that the
// instruction set offers. Only pools are e4m3.
#pragma once

#include <cstdint>
#include <cstring>

namespace paged {

struct bf16 {
  std::uint16_t bits;
};

struct f16 {
  std::uint16_t bits;
};

// FP8 "fn": no infinities, largest 448, multiples of 2^-9 below 2^-6.
struct e4m3 {
  std::uint8_t bits;
};

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };
inline constexpr int kNumDTypes = 3;

inline int element_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

inline float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) { return float_from_bits(static_cast<std::uint32_t>(value.bits) << 16); }

inline float to_float(f16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // infinity, NaN
  if (magnitude >= 0x0400u) return float_from_bits(sign | ((magnitude << 13) + 0x38000000u));         // normal
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return float_from_bits(sign | bits_of_float(subnormal));
}

// The NaN codes 0x7f and 0xff are never written; they become +-480, as in every decoder of ours.
inline float to_float(e4m3 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x80u) << 24;
  const std::uint32_t magnitude = value.bits & 0x7fu;
  const float subnormal = static_cast<float>(magnitude) * 0x1p-9f;
  const std::uint32_t bits = magnitude < 8 ? bits_of_float(subnormal) : (magnitude << 20) + 0x3c000000u;
  return float_from_bits(sign | bits);
}

// Rounds to nearest, ties to even; what is too large, and NaN, becomes the largest. The same bits as gpu/device/fp8.py.
inline void from_float(float value, e4m3& out) {
  const std::uint32_t bits = bits_of_float(value);
  const float absolute = float_from_bits(bits & 0x7fffffffu);
  const float magnitude = absolute < 448.0f ? absolute : 448.0f;
  const std::uint32_t wide = bits_of_float(magnitude);
  const std::uint32_t normal = ((wide + 0x7ffffu + ((wide >> 20) & 1u)) >> 20) - ((127u - 7u) << 3);
  // Near 2^14 float32 numbers are 2^-9 apart: the sum rounds.
  const std::uint32_t subnormal = bits_of_float(magnitude + 16384.0f) - bits_of_float(16384.0f);
  const std::uint32_t code = magnitude < 0x1p-6f ? subnormal : normal;
  out.bits = static_cast<std::uint8_t>(code | ((bits >> 24) & 0x80u));
}

// Both conversions round to nearest, ties to even, and keep NaN a NaN.
inline void from_float(float value, float& out) { out = value; }

inline void from_float(float value, bf16& out) {
  const std::uint32_t bits = bits_of_float(value);
  out.bits = value != value ? std::uint16_t{0x7fc0} : static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void from_float(float value, f16& out) {
  const std::uint32_t bits = bits_of_float(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t rounded;
  if (magnitude > 0x7f800000u) {
    rounded = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    rounded = 0x7c00u;  // rounds past the largest float16: infinity
  } else if (magnitude >= 0x38800000u) {
    rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {
    // Subnormal: adding 0.5 leaves the value, rounded to a multiple of 2^-24, in the low bits of the mantissa.
    rounded = bits_of_float(float_from_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
  }
  out.bits = static_cast<std::uint16_t>(sign | rounded);
}

}  // namespace paged
