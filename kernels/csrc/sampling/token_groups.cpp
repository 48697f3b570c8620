#include "sampling/token_groups.h"

#include <algorithm>
#include <cstddef>

#include "isa/instruction_set.h"

namespace paged {

SamplingScratch& sampling_scratch() {
  static thread_local SamplingScratch scratch;
  return scratch;
}

TokenGroups::TokenGroups(const float* logits, std::int64_t vocab_size, float temperature, SamplingScratch& scratch)
    : logits_(logits), vocab_size_(vocab_size), scaled_{-kAnyDistance, temperature}, scratch_(scratch) {
  std::vector<float>& nearest = scratch.nearest;
  nearest.resize(static_cast<std::size_t>((vocab_size + kTokenGroup - 1) / kTokenGroup));
  const auto largest_logit = kernels().largest_logit;
  for (std::int64_t group = 0; group < count(); ++group) {
    nearest[group] = largest_logit(logits + first_id(group), size(group));
    scaled_.largest = std::max(scaled_.largest, nearest[group]);
  }
  scaled_.largest += 0.0f;  // from -0.0, +0.0 would be at a distance of -0.0
  for (float& one : nearest) {
    const float distance = (scaled_.largest - one) / temperature;
    one = distance >= 0.0f ? distance : kAnyDistance;  // a NaN has no order
  }
}

GroupWeights TokenGroups::weigh(std::int64_t group, float farthest) const {
  GroupWeights result;
  result.total = kernels().weigh_tokens(scaled_, logits_ + first_id(group), size(group), farthest, result.distances, result.weights);
  return result;
}

std::vector<Token>& TokenGroups::find_nearest(std::int64_t count) const {
  const float farthest = distance_of_nearest(count);
  std::vector<Token>& tokens = scratch_.tokens;
  std::size_t found = 0;
  for (std::int64_t group = 0; group < this->count(); ++group) {
    if (nearest(group) > farthest) continue;
    if (tokens.size() < found + kTokenGroup) tokens.resize(2 * found + kTokenGroup);
    const GroupWeights weighed = weigh(group, farthest);
    for (int i = 0; i < size(group); ++i) {  // without a branch, which a processor would often predict wrongly
      tokens[found] = token_of(weighed.distances[i], first_id(group) + i);
      found += weighed.distances[i] <= farthest;
    }
  }
  tokens.resize(found);
  return tokens;
}

// As many groups have a token that is no farther. Groups may be too few to tell.
float TokenGroups::distance_of_nearest(std::int64_t count) const {
  if (count > this->count()) return kAnyDistance;
  std::vector<float>& order = scratch_.order;
  order = scratch_.nearest;
  std::nth_element(order.begin(), order.begin() + (count - 1), order.end());
  return order[count - 1];
}

}  // namespace paged
