// Sampling for Python: rows of logits are borrowed, parameters are checked, and the interpreter's lock is given back for all rows.
#include "bindings/sampling_module.h"

#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "bindings/tensor.h"
#include "sampling/logprobs.h"
#include "sampling/sample_tokens.h"

namespace nb = nanobind;

namespace paged {
namespace {

// Rows of logits, each [vocab_size] float32, in any memory.
struct LogitRows {
  explicit LogitRows(const std::vector<nb::object>& objects) {
    for (const nb::object& object : objects) {
      const TensorView row(object, "a row of logits", 1);
      require(row.element_type() == DType::f32, "a row of logits is not float32");
      row.require_contiguous_from(0);
      require(rows.empty() || row.shape(0) == vocab_size, "rows of logits differ in length");
      vocab_size = row.shape(0);
      rows.push_back(row.data<const float>());
    }
    require(rows.empty() || vocab_size > 0, "a row of logits is empty");
    require(vocab_size <= std::numeric_limits<std::int32_t>::max(), "a row of logits is too long");
  }

  std::vector<const float*> rows;
  std::int64_t vocab_size = 0;
};

std::vector<std::int64_t> bind_sample_tokens(const std::vector<nb::object>& logits, const std::vector<float>& temperatures,
                                             const std::vector<std::int64_t>& top_ks, const std::vector<double>& top_ps,
                                             const std::vector<double>& min_ps, const std::vector<std::uint64_t>& seeds,
                                             const std::vector<std::uint32_t>& positions, const std::vector<std::uint32_t>& choices,
                                             int num_threads) {
  const LogitRows from(logits);
  const std::size_t num_rows = from.rows.size();
  for (const std::size_t size :
       {temperatures.size(), top_ks.size(), top_ps.size(), min_ps.size(), seeds.size(), positions.size(), choices.size()}) {
    require(size == num_rows, "every parameter needs an entry for each row");
  }
  std::vector<SampledRow> rows;
  for (std::size_t i = 0; i < num_rows; ++i) {
    require(temperatures[i] > 0.0f, "a temperature must be above 0");
    const auto farthest = min_ps[i] > 0.0 ? static_cast<float>(-std::log(min_ps[i])) : std::numeric_limits<float>::infinity();
    rows.push_back({from.rows[i], temperatures[i], top_ks[i], top_ps[i], farthest, {seeds[i], positions[i], choices[i]}});
  }
  std::vector<std::int64_t> token_ids(num_rows);
  {
    const nb::gil_scoped_release release;
    sample_tokens(rows, from.vocab_size, num_threads, token_ids.data());
  }
  return token_ids;
}

template <class T>
nb::bytes bytes_of(const std::vector<T>& column) {
  return nb::bytes(column.data(), column.size() * sizeof(T));
}

nb::tuple bind_token_logprobs(const std::vector<nb::object>& logits, const std::vector<std::int64_t>& token_ids, std::int64_t num_top,
                              int num_threads) {
  LogitRows from(logits);
  const std::size_t num_rows = from.rows.size();
  require(token_ids.size() == num_rows, "every row needs a token");
  for (const std::int64_t id : token_ids) require(id >= 0 && id < from.vocab_size, "a token is outside the vocabulary");
  require(num_top >= 0 && (num_rows == 0 || num_top <= from.vocab_size), "num_top is not within the vocabulary");
  const std::size_t num_tops = num_rows * static_cast<std::size_t>(num_top);
  std::vector<float> of_tokens(num_rows), of_tops(num_tops);
  std::vector<std::uint32_t> ranks(num_rows), top_ids(num_tops);
  {
    const nb::gil_scoped_release release;
    logprobs({std::move(from.rows), from.vocab_size, token_ids.data(), num_top, of_tokens.data(), ranks.data(), top_ids.data(), of_tops.data()},
             num_threads);
  }
  return nb::make_tuple(bytes_of(of_tokens), bytes_of(ranks), bytes_of(top_ids), bytes_of(of_tops));
}

}  // namespace

void define_sampling(nb::module_& m) {
  using namespace nb::literals;
  m.def("sample_tokens", &bind_sample_tokens, "logits"_a, "temperatures"_a, "top_ks"_a, "top_ps"_a, "min_ps"_a, "seeds"_a, "positions"_a,
        "choices"_a, "num_threads"_a);
  m.def("token_logprobs", &bind_token_logprobs, "logits"_a, "token_ids"_a, "num_top"_a, "num_threads"_a);
}

}  // namespace paged
