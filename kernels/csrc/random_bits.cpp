#include "random_bits.h"

#include <algorithm>

namespace paged {
namespace {

constexpr int kRounds = 10;
constexpr int kWords = 4;

void philox(std::uint32_t (&words)[kWords], std::uint64_t key) {
  auto low_key = static_cast<std::uint32_t>(key);
  auto high_key = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t even = std::uint64_t{0xD2511F53} * words[0];
    const std::uint64_t odd = std::uint64_t{0xCD9E8D57} * words[2];
    words[0] = static_cast<std::uint32_t>(odd >> 32) ^ words[1] ^ low_key;
    words[1] = static_cast<std::uint32_t>(odd);
    words[2] = static_cast<std::uint32_t>(even >> 32) ^ words[3] ^ high_key;
    words[3] = static_cast<std::uint32_t>(even);
    low_key += 0x9E3779B9;
    high_key += 0xBB67AE85;
  }
}

}  // namespace

void uniform(const UniformCall& call) {
  for (std::int64_t draw = 0; draw < call.num_draws; ++draw) {
    double* out = call.out + draw * call.count;
    auto counter = static_cast<std::uint32_t>(call.first_indices[draw] / kWords);
    for (std::int64_t i = 0; i < call.count; i += kWords, ++counter) {
      std::uint32_t words[kWords] = {counter, call.positions[draw], call.choices[draw], call.stream};
      philox(words, call.seeds[draw]);
      const std::int64_t left = std::min<std::int64_t>(kWords, call.count - i);
      for (std::int64_t word = 0; word < left; ++word) out[i + word] = (words[word] + 0.5) * 0x1p-32;
    }
  }
}

}  // namespace paged
