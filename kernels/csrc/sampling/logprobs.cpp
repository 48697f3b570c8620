#include "sampling/logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/parallel.h"
#include "sampling/token_groups.h"

namespace paged {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class Row {
 public:
  Row(const float* logits, std::int64_t vocab_size, SamplingScratch& scratch) : logits_(logits), groups_(logits, vocab_size, 1.0f, scratch) {
    double total = 0.0;
    for (std::int64_t group = 0; group < groups_.count(); ++group) total += groups_.weigh(group, kFarthest).total;
    log_total_ = std::log(total);
  }

  // The total is a NaN if a logit is one, or if the largest is infinite.
  bool is_finite() const { return !std::isnan(log_total_); }

  float logprob(std::int64_t id) const { return static_cast<float>(static_cast<double>(logits_[id] - groups_.largest_logit()) - log_total_); }

  // 1 + how many tokens are more likely.
  std::uint32_t rank(std::int64_t id) const {
    std::uint32_t rank = 1;
    for (std::int64_t group = 0; group < groups_.count(); ++group) {
      if (groups_.nearest(group) > groups_.largest_logit() - logits_[id]) continue;
      const float* logits = logits_ + groups_.first_id(group);
      for (int i = 0; i < groups_.size(group); ++i) rank += logits[i] > logits_[id];
    }
    return rank;
  }

  // In the order of logits: distances are rounded.
  void find_most_likely(std::int64_t count, std::uint32_t* ids, float* logprobs) const {
    std::vector<Token>& tokens = groups_.find_nearest(count);
    const auto is_more_likely = [&](Token one, Token other) {
      const float logit = logits_[id_of(one)], other_logit = logits_[id_of(other)];
      return logit != other_logit ? logit > other_logit : id_of(one) < id_of(other);
    };
    std::partial_sort(tokens.begin(), tokens.begin() + count, tokens.end(), is_more_likely);
    for (std::int64_t i = 0; i < count; ++i) {
      ids[i] = static_cast<std::uint32_t>(id_of(tokens[i]));
      logprobs[i] = logprob(ids[i]);
    }
  }

 private:
  const float* logits_;
  TokenGroups groups_;
  double log_total_;
};

void logprobs_of_row(const LogprobsCall& call, std::int64_t index) {
  const Row row(call.rows[index], call.vocab_size, sampling_scratch());
  std::uint32_t* top_ids = call.top_ids + index * call.num_top;
  float* top_logprobs = call.top_logprobs + index * call.num_top;
  if (!row.is_finite()) {
    call.logprobs[index] = kNaN;
    call.ranks[index] = 1;
    for (std::int64_t i = 0; i < call.num_top; ++i) top_ids[i] = static_cast<std::uint32_t>(i);
    std::fill_n(top_logprobs, call.num_top, kNaN);
    return;
  }
  call.logprobs[index] = row.logprob(call.token_ids[index]);
  call.ranks[index] = row.rank(call.token_ids[index]);
  if (call.num_top > 0) row.find_most_likely(call.num_top, top_ids, top_logprobs);
}

}  // namespace

void logprobs(const LogprobsCall& call, int num_threads) {
  parallel_for(num_threads, static_cast<std::int64_t>(call.rows.size()), [&](std::int64_t row) { logprobs_of_row(call, row); });
}

}  // namespace paged
