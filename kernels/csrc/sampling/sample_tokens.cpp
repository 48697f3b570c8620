#include "sampling/sample_tokens.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include "runtime/parallel.h"
#include "sampling/token_groups.h"

namespace paged {
namespace {

// The tokens that may be sampled: those nearer than `distance`, and of those at it the ones up to `last_id`.
struct Limit {
  float distance = kFarthest;
  std::int64_t last_id = std::numeric_limits<std::int64_t>::max();
};

Limit limit_at(Token last) { return {distance_of(last), id_of(last)}; }

// The weights of a group; tokens beyond the limit have none.
GroupWeights weigh_allowed(const TokenGroups& groups, std::int64_t group, const Limit& limit) {
  const std::int64_t last = limit.last_id - groups.first_id(group);
  if (last < 0) return groups.weigh(group, std::nextafter(limit.distance, -kAnyDistance));
  GroupWeights result = groups.weigh(group, limit.distance);
  if (last >= kTokenGroup) return result;
  for (std::int64_t i = last + 1; i < kTokenGroup; ++i) {
    if (result.distances[i] == limit.distance) result.weights[i] = 0.0f;
  }
  result.total = 0.0f;
  for (const float weight : result.weights) result.total += weight;
  return result;
}

Limit limit_to_nearest(const TokenGroups& groups, std::int64_t count) {
  std::vector<Token>& tokens = groups.find_nearest(count);
  if (static_cast<std::int64_t>(tokens.size()) < count) return {};  // of a row with a NaN
  const auto last = tokens.begin() + (count - 1);
  std::nth_element(tokens.begin(), last, tokens.end());
  return distance_of(*last) < kFarthest ? limit_at(*last) : Limit{};
}

// The last of the nearest tokens whose weights reach `goal` together; the last of all if rounding keeps their sum below it. Of the two
// halves that the nearest and the others make, it goes on with the one in which the goal is reached.
Token last_to_reach(std::vector<Token>& tokens, double goal) {
  auto begin = tokens.begin(), end = tokens.end();
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end);
    double weight = 0.0;
    for (auto token = begin; token != middle; ++token) weight += std::exp(-static_cast<double>(distance_of(*token)));
    if (weight >= goal) {
      end = middle;
    } else {
      goal -= weight;
      begin = middle;
    }
  }
  return *begin;
}

// The weight of tokens by distance, in buckets of equal width from 0 to `range`.
class WeightByDistance {
 public:
  explicit WeightByDistance(float range) : scale_(kBuckets / range) {}

  void add(const GroupWeights& group) {
    const Buckets buckets = buckets_of(group);
    for (int i = 0; i < kTokenGroup; ++i) {
      const int apart = kBuckets + i;  // a sum that has just been written would be waited for
      sums_[buckets[i] < kBuckets ? buckets[i] : apart] += group.weights[i];
    }
  }

  // The bucket in which the nearest tokens reach `goal`, from which the weight of the buckets before it is taken.
  int find(double& goal) const {
    int bucket = 0;
    for (; bucket < kBuckets - 1 && sums_[bucket] < goal; ++bucket) goal -= sums_[bucket];
    return bucket;
  }

  using Buckets = std::array<int, kTokenGroup>;

  Buckets buckets_of(const GroupWeights& group) const {
    Buckets buckets;
    for (int i = 0; i < kTokenGroup; ++i) buckets[i] = bucket_of(group.distances[i]);
    return buckets;
  }

  // kBuckets for tokens that are farther than the range, or whose distance makes no sense.
  int bucket_of(float distance) const {
    const float bucket = distance * scale_;
    return bucket >= 0.0f && bucket < kBuckets ? static_cast<int>(bucket) : kBuckets;
  }

 private:
  static constexpr int kBuckets = 1024;

  float scale_;
  std::array<double, kBuckets + kTokenGroup> sums_{};
};

// The nucleus (Holtzman et al., 2020, section 3.1): the nearest tokens whose weights reach `top_p` of those within the limit. Only the tokens
// of the bucket in which it ends are put into order. The total is 1 or more, so that tokens whose weight is below (1 - top_p) / vocab_size
// are never needed.
Limit limit_to_nucleus(const TokenGroups& groups, double top_p, const Limit& limit, std::vector<Token>& tokens) {
  WeightByDistance weights(static_cast<float>(std::log(static_cast<double>(groups.vocab_size()) / (1.0 - top_p)) + 0.01));
  double total = 0.0;
  for (std::int64_t group = 0; group < groups.count(); ++group) {
    if (groups.nearest(group) > limit.distance) continue;
    const GroupWeights weighed = weigh_allowed(groups, group, limit);
    total += weighed.total;
    weights.add(weighed);
  }
  double goal = top_p * total;
  const int bucket = weights.find(goal);
  tokens.clear();
  for (std::int64_t group = 0; group < groups.count(); ++group) {
    if (groups.nearest(group) > limit.distance || weights.bucket_of(groups.nearest(group)) > bucket) continue;
    const GroupWeights weighed = weigh_allowed(groups, group, limit);
    const auto buckets = weights.buckets_of(weighed);
    for (int i = 0; i < groups.size(group); ++i) {
      if (buckets[i] != bucket || weighed.weights[i] == 0.0f) continue;
      tokens.push_back(token_of(weighed.distances[i], groups.first_id(group) + i));
    }
  }
  return tokens.empty() ? limit : limit_at(last_to_reach(tokens, goal));
}

Limit find_limit(const SampledRow& row, const TokenGroups& groups, std::vector<Token>& tokens) {
  Limit limit;
  if (row.top_k > 0 && row.top_k < groups.vocab_size()) limit = limit_to_nearest(groups, row.top_k);
  if (row.top_p < 1.0) limit = limit_to_nucleus(groups, row.top_p, limit, tokens);
  if (row.farthest < limit.distance) limit = {row.farthest, std::numeric_limits<std::int64_t>::max()};
  return limit;
}

// An index drawn in proportion to its weight: the one with the largest weight / E, where E are independent exponential variables. This is the
// Gumbel-max trick (Maddison et al., 2014, "A* sampling", section 2) without the logarithms of weights.
std::int64_t draw_index(const Draw& draw, RandomStream stream, std::int64_t first, const float* weights, std::int64_t count) {
  std::int64_t drawn = 0;
  double largest = 0.0;
  for (std::int64_t i = 0; i < count; i += kRandomWords) {
    const std::int64_t end = std::min(count, i + kRandomWords);
    if (std::all_of(weights + i, weights + end, [](float weight) { return weight == 0.0f; })) continue;
    const auto numbers = uniform(draw, stream, static_cast<std::uint32_t>((first + i) / kRandomWords));
    for (std::int64_t at = i; at < end; ++at) {
      const double number = numbers[at - i];
      if (weights[at] <= largest * number) continue;  // -log(1 - number) is no less than the number
      const double quotient = weights[at] / -std::log1p(-number);
      if (quotient <= largest) continue;
      largest = quotient;
      drawn = at;
    }
  }
  return drawn;
}

// Draws a group by the weight of its tokens, and one of them by theirs.
std::int64_t sample(const SampledRow& row, std::int64_t vocab_size, SamplingScratch& scratch) {
  const TokenGroups groups(row.logits, vocab_size, row.temperature, scratch);
  const Limit limit = find_limit(row, groups, scratch.tokens);
  scratch.totals.assign(static_cast<std::size_t>(groups.count()), 0.0f);
  for (std::int64_t group = 0; group < groups.count(); ++group) {
    if (groups.nearest(group) <= limit.distance) scratch.totals[group] = weigh_allowed(groups, group, limit).total;
  }
  const std::int64_t group = draw_index(row.draw, RandomStream::token_group, 0, scratch.totals.data(), groups.count());
  const GroupWeights weighed = weigh_allowed(groups, group, limit);
  const std::int64_t first = groups.first_id(group);
  return first + draw_index(row.draw, RandomStream::token, first, weighed.weights, groups.size(group));
}

}  // namespace

void sample_tokens(const std::vector<SampledRow>& rows, std::int64_t vocab_size, int num_threads, std::int64_t* token_ids) {
  parallel_for(num_threads, static_cast<std::int64_t>(rows.size()),
               [&](std::int64_t row) { token_ids[row] = sample(rows[row], vocab_size, sampling_scratch()); });
}

}  // namespace paged
