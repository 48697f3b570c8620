// A token for each row of logits by temperature, top-k, top-p, min-p and a random choice. The same row gives the same token beside any other
// rows and on any number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/random_bits.h"

namespace paged {

struct SampledRow {
  const float* logits;  // [vocab_size], no NaN, the largest is finite
  float temperature;    // above 0
  std::int64_t top_k;   // 0: all
  double top_p;         // 1: all
  float farthest;       // -log(min_p), infinite: all
  Draw draw;
};

void sample_tokens(const std::vector<SampledRow>& rows, std::int64_t vocab_size, int num_threads, std::int64_t* token_ids);

}  // namespace paged
