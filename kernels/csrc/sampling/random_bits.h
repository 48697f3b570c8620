// Random numbers without state: Philox4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
// SC'11). Integers until the end: the bits are the same on every machine.
#pragma once

#include <array>
#include <cstdint>

namespace paged {

inline constexpr std::int64_t kRandomWords = 4;

// One random choice: of the token at `position` of an output.
struct Draw {
  std::uint64_t seed;
  std::uint32_t position;
  std::uint32_t choice;  // which of the request's outputs
};

// Numbers of different streams are independent.
enum class RandomStream : std::uint32_t { token = 0, token_group = 1 };

// Numbers 4 * counter and the three that follow, uniform on the midpoints of 2^32 parts of (0, 1). The key is the seed, the counter
// (counter, position, choice, stream).
std::array<double, kRandomWords> uniform(const Draw& draw, RandomStream stream, std::uint32_t counter);

}  // namespace paged
