#include "plan/options.h"

#include <algorithm>
#include <tuple>

#include "common/error.h"
#include "plan/origin.h"

namespace distca::plan {
namespace {

void check_heads(const HeadShape& h) {
  require(h.q_heads >= 1 && h.kv_heads >= 1 && h.q_heads % h.kv_heads == 0 && h.q_heads <= 4096, "heads: ", h.q_heads,
          " query heads and ", h.kv_heads,
          " key/value heads; 1 to 4096 query heads that are a multiple of the key/value heads are allowed");
  require(is_head_dim(h.dim) && is_head_dim(h.v_dim), "heads: dim = ", h.dim, ", v_dim = ", h.v_dim,
          "; multiples of 8 from 8 to ", kMostHeadDim, " are allowed");
  const auto dtype = static_cast<int64_t>(h.dtype);
  require(dtype >= 0 && dtype < kNumDTypes, "heads: dtype number ", dtype, "; 0 to ", kNumDTypes - 1, " are allowed");
}

void check_scores(const PlanOptions& o, const Layout& layout) {
  const int64_t num_scores = std::ssize(o.scores), num_documents = std::ssize(layout.document_lengths());
  require(num_scores >= 1 && num_scores <= kMostScores, "plan: ", num_scores,
          " different masks, windows, scales and softcaps of documents; 1 to ", kMostScores, " are allowed");
  const std::vector<int64_t>& of_document = o.scores_of_document;
  require(of_document.empty() || std::ssize(of_document) == num_documents, "plan: scores of ", of_document.size(),
          " documents, the layout has ", num_documents);
  for (const int64_t index : of_document)
    require(index >= 0 && index < num_scores, "plan: scores number ", index, " of ", num_scores);
  for (const ScoresRow& s : o.scores) {
    require(s.mask_kind >= 0 && s.mask_kind < kNumMaskKinds, "plan: mask number ", s.mask_kind, "; 0 to ",
            kNumMaskKinds - 1, " are allowed");
    require(s.window >= 0 && s.window <= kMostWindow, "plan: window = ", s.window, "; 0 (none) and 1 to ", kMostWindow,
            " keys are allowed");
    for (const auto& [name, word, first] :
         {std::tuple{"scale", s.scale, o.scores[0].scale}, {"softcap", s.softcap, o.scores[0].softcap}}) {
      require(word == kOfTheCall || is_score_word(word), "plan: ", name, " is not a finite number");
      require((word == kOfTheCall) == (first == kOfTheCall), "plan: some documents have a ", name,
              " and others leave it to the calls; give it for all or for none");
    }
    require(s.softcap == kOfTheCall || score_value(s.softcap) >= 0.f, "plan: softcap = ", score_value(s.softcap),
            "; 0 (none) or a positive number is allowed");
  }
}

}  // namespace

void PlanOptions::check(const Layout& layout) const {
  check_heads(heads);
  cost.check();
  check_scores(*this, layout);
  require(tolerance_ppm >= 0 && tolerance_ppm <= 1'000'000,
          "plan: tolerance = ", static_cast<double>(tolerance_ppm) * 1e-6, "; 0 to 1 is allowed");
  require(min_rows >= 1, "plan: min_rows = ", min_rows, "; at least 1 is allowed");
  for (size_t i = 0; i < servers.size(); ++i) {
    require(servers[i] >= 0 && servers[i] < layout.num_ranks() && (i == 0 || servers[i - 1] < servers[i]),
            "plan: servers[", i, "] = ", servers[i], "; ascending ranks below ", layout.num_ranks(), " are allowed");
  }
  require(speeds.empty() || static_cast<int64_t>(speeds.size()) == layout.num_ranks(), "plan: ", speeds.size(),
          " speeds for ", layout.num_ranks(), " ranks");
  for (size_t i = 0; i < speeds.size(); ++i)
    require(speeds[i] >= 1 && speeds[i] <= 1 << 20, "plan: speeds[", i, "] = ", speeds[i], "; 1 to ", 1 << 20,
            " are allowed");
  require(ranks_per_node >= 0, "plan: ranks_per_node = ", ranks_per_node,
          "; 0 (one node) or a positive number is allowed");
  require(balance || servers.empty(), "plan: servers are given, but without balance every row is computed ", "at home");
  require(round_bytes >= 1, "plan: round_bytes = ", round_bytes, "; at least 1 is allowed");
  require(reduce_dtype == DType::kFloat32 || reduce_dtype == heads.dtype, "plan: reduce_dtype number ",
          static_cast<int64_t>(reduce_dtype), "; float32 or the dtype of the heads, ", dtype_name(heads.dtype),
          ", is allowed");
  require(retain_bytes.empty() || static_cast<int64_t>(retain_bytes.size()) == layout.num_ranks(),
          "plan: retain_bytes has ", retain_bytes.size(), " numbers for ", layout.num_ranks(), " ranks");
  for (size_t i = 0; i < retain_bytes.size(); ++i)
    require(retain_bytes[i] >= 0, "plan: retain_bytes of rank ", i, " = ", retain_bytes[i],
            "; 0 or a positive number is allowed");
  require(is_label(label), "plan: a label of ", label.size(), " bytes; up to ", 8 * kLabelWords,
          " bytes of printable ASCII are allowed");
  require(capacity > 0, "plan: capacity = ", capacity, " bytes; it must be positive");
  const auto& table = cost.rates.rates;
  const int64_t dearest = table.empty() ? RateTable::kRateUnit : *std::max_element(table.begin(), table.end());
  __int128 pairs = 0, rows = 0;
  for (int64_t i = 0; i < std::ssize(layout.document_lengths()); ++i) {
    const Document one = document(layout, i);
    pairs += visible_pairs(one, 0, one.length);
    rows += one.length;
  }
  const __int128 total = (pairs * cost.per_pair * dearest / RateTable::kRateUnit + rows * cost.per_row) * heads.q_heads;
  require(total < static_cast<__int128>(INT64_MAX) / 2, "plan: the total cost of the layout passes 2^62; make the ",
          "cost model's units coarser or the documents shorter");
}

bool PlanOptions::retains() const {
  return std::any_of(retain_bytes.begin(), retain_bytes.end(), [](int64_t bytes) { return bytes > 0; });
}

}  // namespace distca::plan
