// copy_rows for Python: buffers are held for the call, rows are checked against them, and the interpreter's lock is given back for all of
// a batch.
#include "bindings/copy_digest_module.h"

#include <nanobind/stl/vector.h>

#include <cstddef>
#include <stdexcept>
#include <vector>

#include "copy_digest.h"

namespace nb = nanobind;

namespace paged {
namespace {

class Bytes {
 public:
  Bytes(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  std::uint8_t* row(std::int64_t index, std::int64_t row_bytes) const {
    if (index < 0 || index >= view_.len / row_bytes) throw std::out_of_range("a row is outside its buffer");
    return static_cast<std::uint8_t*>(view_.buf) + index * row_bytes;
  }

 private:
  Py_buffer view_{};
};

nb::bytes copy_rows(nb::handle target, const std::vector<std::int64_t>& target_rows, nb::handle source,
                    const std::vector<std::int64_t>& source_rows, std::int64_t row_bytes) {
  if (!can_copy_rows()) throw std::invalid_argument("this processor has no instructions for it");
  if (row_bytes < kShortestRow || row_bytes % kStripeBytes != 0) throw std::invalid_argument("rows are no whole stripes of 64 bytes, or fewer than four");
  if (target_rows.size() != source_rows.size()) throw std::invalid_argument("as many rows are needed as there are targets");
  const Bytes to(target, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
  const Bytes from(source, PyBUF_C_CONTIGUOUS);
  struct Copy {
    std::uint8_t* target;
    const std::uint8_t* source;
  };
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < target_rows.size(); ++i) copies.push_back({to.row(target_rows[i], row_bytes), from.row(source_rows[i], row_bytes)});
  std::vector<std::uint8_t> digests(copies.size() * kDigestBytes);
  {
    const nb::gil_scoped_release release;
    for (std::size_t i = 0; i < copies.size(); ++i) copy_row(copies[i].target, copies[i].source, row_bytes, digests.data() + i * kDigestBytes);
  }
  return nb::bytes(digests.data(), digests.size());
}

}  // namespace

void define_copy_digest(nb::module_& m) {
  using namespace nb::literals;
  m.def("can_copy_rows", &can_copy_rows);
  m.def("copy_rows", &copy_rows, "target"_a, "target_rows"_a, "source"_a, "source_rows"_a, "row_bytes"_a);
}

}  // namespace paged
