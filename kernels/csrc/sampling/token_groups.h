// A row of logits in groups of tokens with consecutive ids. Whoever looks for likely tokens passes over the groups that have none.
//
// A token's distance is how far its logit lies below the largest, by temperature; its weight is exp(-distance).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "isa/kernel_table.h"

namespace paged {

inline constexpr float kAnyDistance = std::numeric_limits<float>::infinity();  // also that of a logit of -infinity
inline constexpr float kFarthest = std::numeric_limits<float>::max();  // of other logits

// A token in the order of distances, and of ids among equals: floats that are not negative are in the order of their bits.
using Token = std::uint64_t;

inline Token token_of(float distance, std::int64_t id) {
  return static_cast<std::uint64_t>(std::bit_cast<std::uint32_t>(distance)) << 32 | static_cast<std::uint32_t>(id);
}
inline float distance_of(Token token) { return std::bit_cast<float>(static_cast<std::uint32_t>(token >> 32)); }
inline std::int64_t id_of(Token token) { return static_cast<std::uint32_t>(token); }

// What a thread keeps between rows.
struct SamplingScratch {
  std::vector<float> nearest;  // of each group: the least distance of its tokens
  std::vector<float> totals;   // of each group: the weight of its tokens
  std::vector<float> order;
  std::vector<Token> tokens;
};

SamplingScratch& sampling_scratch();  // of the calling thread

// Entries behind the last token's have an infinite distance and no weight.
struct GroupWeights {
  float distances[kTokenGroup];
  float weights[kTokenGroup];
  float total;
};

// Safe for any floats; of a row with a NaN, or whose largest logit is not finite, results are without meaning.
class TokenGroups {
 public:
  TokenGroups(const float* logits, std::int64_t vocab_size, float temperature, SamplingScratch& scratch);

  std::int64_t vocab_size() const { return vocab_size_; }
  float largest_logit() const { return scaled_.largest; }
  std::int64_t count() const { return static_cast<std::int64_t>(scratch_.nearest.size()); }
  std::int64_t first_id(std::int64_t group) const { return group * kTokenGroup; }
  int size(std::int64_t group) const { return static_cast<int>(std::min<std::int64_t>(kTokenGroup, vocab_size_ - first_id(group))); }
  float nearest(std::int64_t group) const { return scratch_.nearest[group]; }
  // Tokens beyond `farthest` have no weight.
  GroupWeights weigh(std::int64_t group, float farthest) const;
  // Finds `count` tokens, all of those that are as near as the farthest of these, and usually few others.
  std::vector<Token>& find_nearest(std::int64_t count) const;

 private:
  float distance_of_nearest(std::int64_t count) const;

  const float* logits_;
  std::int64_t vocab_size_;
  ScaledLogits scaled_;
  SamplingScratch& scratch_;
};

}  // namespace paged
