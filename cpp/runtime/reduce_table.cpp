#include "runtime/reduce_table.h"

#include <algorithm>
#include <tuple>

#include "common/align.h"

namespace distca::runtime {

using plan::ReceiveAction;
using plan::ReceiveRow;
using plan::TensorKind;

void ReduceTable::fill(const plan::SliceView& slice, int64_t round, std::byte* arena, const RowView& dk,
                       const RowView& dv) {
  entries.clear();
  terms.clear();
  num_chunks = 0;
  order_.clear();
  for (const ReceiveRow& r : slice.receives(plan::Phase::kBackward))
    if (r.action != static_cast<int64_t>(ReceiveAction::kCopy)) order_.push_back(&r);
  // By sum, then by round, then in the order of the slice, which is that of the servers.
  std::sort(order_.begin(), order_.end(), [](const ReceiveRow* a, const ReceiveRow* b) {
    return std::tuple(a->sum, a->round, a) < std::tuple(b->sum, b->round, b);
  });
  const HeadShape heads = slice.heads();
  for (auto first = order_.begin(); first != order_.end();) {
    const auto end = std::find_if(first, order_.end(), [&](const ReceiveRow* r) { return r->sum != (*first)->sum; });
    const auto begin = std::find_if(first, end, [&](const ReceiveRow* r) { return r->round == round; });
    const auto later = std::find_if(begin, end, [&](const ReceiveRow* r) { return r->round != round; });
    first = end;
    if (begin == end) continue;
    const ReceiveRow& r = **begin;
    const auto kind = static_cast<TensorKind>(r.tensor);
    const bool is_dk = plan::is_key_gradient_dk(kind);
    const RowView to = (is_dk ? dk : dv).from(r.row, r.kv_head_begin);
    ReduceEntry e;
    e.sum = reinterpret_cast<float*>(arena + r.sum);
    e.to = to.data;
    e.to_row_stride = to.row_stride;
    e.to_head_stride = to.head_stride;
    e.num_heads = static_cast<int32_t>(r.kv_head_end - r.kv_head_begin);
    e.dim = static_cast<int32_t>(is_dk ? heads.dim : heads.v_dim);
    e.num_values = r.num_rows * e.num_heads * e.dim;
    e.first_term = static_cast<int32_t>(terms.size());
    e.first_chunk = num_chunks;
    e.starts = r.action == static_cast<int64_t>(ReceiveAction::kAssign);
    e.finishes = later == end;
    e.narrow = !plan::is_partial(kind);
    for (auto term = begin; term != later; ++term)
      if ((*term)->action != static_cast<int64_t>(ReceiveAction::kFinish)) terms.push_back(arena + (*term)->source);
    e.num_terms = static_cast<int32_t>(terms.size()) - e.first_term;
    num_chunks += static_cast<int32_t>(ceil_div(e.num_values, kReduceChunk));
    entries.push_back(e);
  }
}

}  // namespace distca::runtime
