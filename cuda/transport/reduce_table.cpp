#include "transport/reduce_table.h"

#include <algorithm>
#include <unordered_map>

namespace distca::cuda {
namespace {

using plan::ReceiveAction;
using plan::ReceiveRow;
using plan::TensorKind;

bool is_partial(const ReceiveRow& r) { return r.action != static_cast<int64_t>(ReceiveAction::kCopy); }

/// The last round that adds to each sum, by the sum's offset in the arena.
std::unordered_map<int64_t, int64_t> last_rounds(std::span<const ReceiveRow> receives) {
  std::unordered_map<int64_t, int64_t> last;
  for (const ReceiveRow& r : receives)
    if (is_partial(r)) last[r.sum] = std::max(last.try_emplace(r.sum, r.round).first->second, r.round);
  return last;
}

}  // namespace

ReduceTable reduce_table(const plan::SliceView& slice, int64_t round, std::byte* arena, const RowView& dk,
                         const RowView& dv) {
  const HeadShape heads = slice.heads();
  const std::span<const ReceiveRow> receives = slice.receives(plan::Phase::kBackward);
  const std::unordered_map<int64_t, int64_t> last = last_rounds(receives);

  // The terms of a sum, in the order of the slice, which is that of the servers.
  std::unordered_map<int64_t, std::vector<const ReceiveRow*>> terms_of;
  std::vector<int64_t> sums;
  for (const ReceiveRow& r : receives) {
    if (!is_partial(r) || r.round != round) continue;
    std::vector<const ReceiveRow*>& terms = terms_of[r.sum];
    if (terms.empty()) sums.push_back(r.sum);
    terms.push_back(&r);
  }

  ReduceTable table;
  for (const int64_t sum : sums) {
    const std::vector<const ReceiveRow*>& terms = terms_of[sum];
    const ReceiveRow& r = *terms.front();
    const bool is_dk = r.tensor == static_cast<int64_t>(TensorKind::kDkPartial);
    const RowView to = (is_dk ? dk : dv).from(r.row, r.kv_head_begin);
    ReduceEntry e;
    e.sum = reinterpret_cast<float*>(arena + sum);
    e.to = to.data;
    e.to_row_stride = to.row_stride;
    e.to_head_stride = to.head_stride;
    e.num_heads = static_cast<int32_t>(r.kv_head_end - r.kv_head_begin);
    e.dim = static_cast<int32_t>(is_dk ? heads.dim : heads.v_dim);
    e.num_values = r.num_rows * e.num_heads * e.dim;
    e.first_term = static_cast<int32_t>(table.terms.size());
    e.num_terms = static_cast<int32_t>(terms.size());
    e.first_chunk = table.num_chunks;
    e.starts = r.action == static_cast<int64_t>(ReceiveAction::kAssign);
    e.finishes = last.at(sum) == round;
    for (const ReceiveRow* term : terms) table.terms.push_back(reinterpret_cast<const float*>(arena + term->source));
    table.num_chunks += static_cast<int32_t>((e.num_values + kReduceChunk - 1) / kReduceChunk);
    table.entries.push_back(e);
  }
  return table;
}

}  // namespace distca::cuda
