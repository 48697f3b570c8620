// Element types of pools and activations. bfloat16 and float16 are storage only: arithmetic is float32, except for dot products that
// the instruction set offers.
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
