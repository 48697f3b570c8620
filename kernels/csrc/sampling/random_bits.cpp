#include "sampling/random_bits.h"

namespace paged {
namespace {

constexpr int kRounds = 10;

}  // namespace

std::array<double, kRandomWords> uniform(const Draw& draw, RandomStream stream, std::uint32_t counter) {
  std::uint32_t words[kRandomWords] = {counter, draw.position, draw.choice, static_cast<std::uint32_t>(stream)};
  auto low_key = static_cast<std::uint32_t>(draw.seed);
  auto high_key = static_cast<std::uint32_t>(draw.seed >> 32);
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
  std::array<double, kRandomWords> numbers;
  for (int i = 0; i < kRandomWords; ++i) numbers[i] = (words[i] + 0.5) * 0x1p-32;
  return numbers;
}

}  // namespace paged
