// Random numbers without state, for sampling: Philox4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy
// as 1, 2, 3", SC'11). The key is the seed; the counter is (index / 4, position, choice, stream), and its four words serve four
// consecutive indices. Integers until the end: the bits are the same on every machine.
#pragma once

#include <cstdint>

namespace paged {

struct UniformCall {
  const std::uint64_t* seeds;        // of each draw, as the following
  const std::uint32_t* positions;
  const std::uint32_t* choices;
  const std::int64_t* first_indices;  // multiples of 4
  std::uint32_t stream;
  std::int64_t num_draws;
  std::int64_t count;
  double* out;  // [num_draws, count]: numbers first_indices[i] and following of draw i, the midpoints of 2^32 parts of (0, 1)
};

void uniform(const UniformCall& call);

}  // namespace paged
