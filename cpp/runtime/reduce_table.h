// The sums of one round of a backward step at home. The contributions to dk, dv that came, in fp32 or in the dtype of
// the heads, are added in one pass, in fp32 and in the order of the plan. The pass of a row's last round casts the sum
// into the returned tensor. What a thread of the GPU's kernel does is a function for host and device, so that tests on
// the host cover it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/error.h"
#include "common/host_device.h"
#include "common/rows.h"
#include "plan/tables.h"

namespace distca::runtime {

/// Rows of dk or dv of a range of heads, as [rows, heads, dim] values. Terms and sums lie densely, sums in fp32; the
/// returned tensor has strides.
struct ReduceEntry {
  float* sum;  // read unless the entry `starts` the sum; written unless it `finishes` it
  std::byte* to;
  int64_t to_row_stride, to_head_stride;  // bytes
  int64_t num_values;
  int32_t num_heads, dim;
  int32_t first_term, num_terms;
  int32_t first_chunk;
  bool starts, finishes;
  bool narrow;  // terms are in the dtype of the heads, of two bytes; else in fp32
};

/// The number of values of an entry that one thread block takes at a time.
inline constexpr int64_t kReduceChunk = 8192;

/// The values that a thread takes at a time. They are of one head, because dims are multiples of 8, and aligned in an
/// arena.
struct alignas(16) Four {
  float x[4];
};
struct alignas(8) FourNarrow {
  uint16_t x[4];
};

/// Values [i, i + 4) of the sum of an entry, with the terms of this round added in their order. `widen` casts the bits
/// of a number of the dtype of the heads, if that has two bytes, to fp32.
template <class Widen>
DISTCA_HOST_DEVICE Four reduced(const ReduceEntry& e, const std::byte* const* terms, int64_t i, const Widen& widen) {
  const auto term = [&](int32_t t) {
    if (!e.narrow) return *reinterpret_cast<const Four*>(terms[t] + 4 * i);
    const FourNarrow values = *reinterpret_cast<const FourNarrow*>(terms[t] + 2 * i);
    Four widened;
    for (int j = 0; j < 4; ++j) widened.x[j] = widen(values.x[j]);
    return widened;
  };
  int32_t t = e.first_term;
  Four sum = e.starts ? term(t++) : *reinterpret_cast<const Four*>(e.sum + i);
  for (; t < e.first_term + e.num_terms; ++t) {
    const Four next = term(t);
    for (int j = 0; j < 4; ++j) sum.x[j] += next.x[j];
  }
  return sum;
}

/// The place of value `i` in the returned tensor.
DISTCA_HOST_DEVICE inline std::byte* place_of_value(const ReduceEntry& e, int64_t i, int32_t element_bytes) {
  const int64_t head_of_row = i / e.dim;
  return e.to + head_of_row / e.num_heads * e.to_row_stride + head_of_row % e.num_heads * e.to_head_stride +
         i % e.dim * element_bytes;
}

/// A table is meant to be filled again and again. It allocates nothing once it has seen the largest round.
class DISTCA_EXPORT ReduceTable {
 public:
  std::vector<ReduceEntry> entries;
  std::vector<const std::byte*> terms;
  int32_t num_chunks = 0;

  /// Fills the table with round `round` of a backward step at home. `arena` is the slot's, `dk` and `dv` are the
  /// returned tensors.
  void fill(const plan::SliceView& slice, int64_t round, std::byte* arena, const RowView& dk, const RowView& dv);

 private:
  std::vector<const plan::ReceiveRow*> order_;
};

}  // namespace distca::runtime
