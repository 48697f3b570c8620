// Log-probabilities of one token for each row of logits, and of the row's most likely tokens.
#pragma once

#include <cstdint>
#include <vector>

namespace paged {

// Outputs have a row for each row of logits. Of a row with a NaN, or whose largest logit is not finite, all log-probabilities are NaN.
struct LogprobsCall {
  std::vector<const float*> rows;  // [vocab_size] logits each
  std::int64_t vocab_size;
  const std::int64_t* token_ids;  // [num_rows]
  std::int64_t num_top;           // up to vocab_size
  float* logprobs;                // [num_rows], of token_ids
  std::uint32_t* ranks;           // [num_rows], of token_ids: 1 + how many tokens are more likely
  std::uint32_t* top_ids;         // [num_rows, num_top], the most likely first, of equals the lowest id
  float* top_logprobs;            // [num_rows, num_top]
};

void logprobs(const LogprobsCall& call, int num_threads);

}  // namespace paged
