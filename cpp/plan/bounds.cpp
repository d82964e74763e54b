// Lower bounds of load and bytes, with their proofs.
#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "common/align.h"
#include "plan/limits.h"
#include "plan/scheduler.h"

namespace distca::plan {
namespace {

using Wide = __int128;

/// A lower bound of the bytes that cross the border of a set of ranks when `excess` of the cost of the rows that they
/// hold is computed elsewhere.
///
/// Let n rows of a document, for one head, be computed elsewhere, and let C be their cost. Each of the n crosses the
/// border with its query and its result: n times `query_row`. Their keys cross it once at least: under the causal mask
/// all rows held up to the highest of the n, under the full mask all rows held, under a window at least n. Hence the
/// bytes are at least some B(C). For every price x > 0 of a unit of cost, and for all documents and heads together,
///     bytes >= sum B(C) >= x excess - sum (x C - B(C)) >= x excess - sum max_C (x C - B(C)).
/// That maximum is known. Rows that cost more than t = query_row / x are worth their bytes. If any row is worth them,
/// all such rows are, because under the causal mask the next higher row costs more at the same bytes. Every t gives a
/// valid bound, and halving finds the best one. The proof needs costs that add up, rows that cost no less than those
/// before them, and keys that one document alone needs. It does not hold for cost models with rates, where rows under a
/// window see those after them, nor where documents share rows.
class BorderBound {
 public:
  BorderBound(const Layout& layout, const PlanOptions& options)
      : layout_(layout),
        options_(options),
        cost_(options.cost),
        groups_(head_groups(options).num_groups),
        query_row_(prices(options).query_row) {
    // A key's gradient travels in the input dtype where one server alone contributes to it. The key itself travels once
    // for each phase, or once in all where it may be retained.
    const int64_t row = options.heads.element_bytes() * (options.heads.dim + options.heads.v_dim);
    key_row_ = row * head_groups(options).heads_of_group *
               (options.objective == Objective::kForward ? 1
                : options.retains()                      ? 2
                                                         : 3);
  }

  int64_t bytes(std::vector<Placement>& held, int64_t excess) {
    std::sort(held.begin(), held.end(), [](const Placement& a, const Placement& b) {
      return a.document != b.document ? a.document < b.document : a.begin < b.begin;
    });
    documents_.clear();
    int64_t low = 1, high = 1, best = 0;
    for (const Placement& p : held) {
      if (documents_.empty() || documents_.back().placements.front().document != p.document)
        documents_.push_back({std::span(&p, 0), 0});
      Held& d = documents_.back();
      d = {std::span(d.placements.data(), d.placements.size() + 1), row_cost(p, p.end - 1)};
      high = std::max(high, d.top_cost);
    }
    while (low <= high) {
      const int64_t t = low + (high - low) / 2;
      Wide moved = 0, gain = 0;
      for (const Held& d : documents_) add(d, t, moved, gain);
      best = std::max(best, static_cast<int64_t>((Wide{query_row_} * excess - gain * groups_) / t));
      if (moved * groups_ > excess) {
        low = t + 1;
        std::erase_if(documents_, [&](const Held& d) { return d.top_cost < low; });
      } else {
        high = t - 1;
      }
    }
    return best;
  }

 private:
  /// The rows that are held of a document.
  struct Held {
    std::span<const Placement> placements;
    int64_t top_cost;  // of its last row, which costs the most
  };

  Document document_of(const Placement& p) const { return options_.document(layout_, p.document); }
  int64_t row_cost(const Placement& p, int64_t row) const { return cost_.cost(document_of(p), row, row + 1); }
  /// The first row that costs at least `worth`. There is one, because the last row does; no row costs less than the one
  /// before it.
  int64_t first_row(const Placement& p, int64_t worth) const {
    const Document document = document_of(p);
    if (document.mask.mask.is_full() || worth <= cost_.per_row) return p.begin;
    if (!document.mask.bidirectional.empty()) {
      int64_t low = p.begin, high = p.end - 1;
      while (low < high) {
        const int64_t mid = low + (high - low) / 2;
        if (cost_.cost(document, mid, mid + 1) >= worth)
          high = mid;
        else
          low = mid + 1;
      }
      return low;
    }
    return std::max(p.begin,
                    (worth - cost_.per_row + cost_.per_pair - 1) / cost_.per_pair - 1);  // row i sees i + 1 keys
  }

  /// Adds the document's best C to `moved`, and t / x times what it brings to `gain`.
  void add(const Held& d, int64_t t, Wide& moved, Wide& gain) const {
    // Under a window every row pays for a key.
    const bool key_of_each_row = document_of(d.placements.front()).mask.mask.window > 0;
    const int64_t worth = key_of_each_row ? ceil_div(t * (query_row_ + key_row_), query_row_) : t;
    if (d.top_cost < worth) return;
    int64_t cost = 0, num_rows = 0, num_held = 0;
    for (const Placement& p : d.placements) {
      num_held += p.end - p.begin;
      if (row_cost(p, p.end - 1) < worth) continue;
      const int64_t begin = first_row(p, worth);
      cost += cost_.cost(document_of(p), begin, p.end);
      num_rows += p.end - begin;
    }
    const int64_t num_keys = key_of_each_row ? num_rows : num_held;
    const Wide brings = Wide{query_row_} * cost - Wide{t} * (Wide{query_row_} * num_rows + Wide{key_row_} * num_keys);
    if (brings <= 0) return;
    moved += cost;
    gain += brings;
  }

  const Layout& layout_;
  const PlanOptions& options_;
  const CostModel& cost_;
  int64_t groups_;
  int64_t query_row_, key_row_;
  std::vector<Held> documents_;
};

/// Whether rows under a window see those after them. Rows that come later may see fewer keys.
bool rows_may_cost_less_than_earlier_ones(const Layout& layout, const PlanOptions& options) {
  for (int64_t i = 0; i < layout.num_documents(); ++i) {
    const Document document = options.document(layout, i);
    const auto& [mask, bidirectional] = document.mask;
    if (mask.window > 0 && (mask.is_full() ? mask.window < document.length : !bidirectional.empty())) return true;
  }
  return false;
}

/// A lower bound of the bytes that leave sets of `size` consecutive ranks: what such a set holds above the limits of
/// its ranks must be computed elsewhere.
int64_t bytes_between(const Layout& layout, const PlanOptions& options, const std::vector<int64_t>& load,
                      const std::vector<int64_t>& limits, std::span<const Placement> by_rank, size_t size) {
  int64_t bytes = 0;
  BorderBound bound(layout, options);
  std::vector<Placement> held;
  auto next = by_rank.begin();
  for (size_t begin = 0; begin < load.size(); begin += size) {
    const size_t end = std::min(load.size(), begin + size);
    const auto first = next;
    while (next != by_rank.end() && next->rank < static_cast<int64_t>(end)) ++next;
    int64_t excess = 0;
    for (size_t r = begin; r < end; ++r) excess += load[r] - limits[r];
    if (excess <= 0) continue;
    held.assign(first, next);
    bytes += bound.bytes(held, excess);
  }
  return bytes;
}

}  // namespace

int64_t load_lower_bound(const Layout& layout, const PlanOptions& options) {
  // However rows are cut into tasks, and wherever they are computed, together they cost at least `total`.
  const HeadGroups groups = head_groups(options);
  int64_t pairs = 0, rows = 0, costliest = 0;
  for (const Placement& p : layout.placements()) {
    const Document document = options.document(layout, p.document);
    pairs += visible_pairs(document, p.begin, p.end);
    rows += p.end - p.begin;
    // Under a full mask with a window those next to the middle see the most keys, and otherwise the last.
    const int64_t row = document.mask.mask.is_full() ? std::clamp(document.length / 2, p.begin, p.end - 1) : p.end - 1;
    costliest = std::max(costliest, visible_pairs(document, row, row + 1));
    if (document.mask.mask.window == 0) continue;
    for (const BidirectionalRows& rows : layout.bidirectional(p.document))  // the first of them sees the most keys
      costliest = std::max(costliest, visible_pairs(document, rows.begin, rows.begin + 1));
  }
  costliest = costliest > 0 ? options.cost.least_cost(costliest, 1) : 0;
  const int64_t total = groups.num_groups * options.cost.least_cost(pairs, rows);
  const std::vector<int64_t> speeds = server_speeds(layout, options);
  const int64_t num_servers = std::ssize(speeds) - std::count(speeds.begin(), speeds.end(), 0);
  const int64_t fastest = *std::max_element(speeds.begin(), speeds.end());
  const Wide sum = std::accumulate(speeds.begin(), speeds.end(), int64_t{0});
  // A load at mean speed is the load times the mean speed over the server's speed.
  const bool even = sum == Wide{fastest} * num_servers;
  const int64_t mean = even ? ceil_div(total, num_servers) : total / num_servers;
  return std::max(mean, static_cast<int64_t>(Wide{costliest} * sum / (Wide{fastest} * num_servers))) *
         groups.query_heads_of_group;
}

ByteBounds byte_lower_bounds(const Layout& layout, const PlanOptions& options) {
  if (!options.cost.is_additive() || layout.has_shared() || rows_may_cost_less_than_earlier_ones(layout, options))
    return {};
  const std::vector<int64_t> load = loads_at_home(layout, options), speeds = server_speeds(layout, options);
  const int64_t total = std::accumulate(load.begin(), load.end(), int64_t{0});
  const std::vector<int64_t> limits = load_limits(total, speeds, options.tolerance_ppm);
  std::vector<size_t> next(load.size() + 1, 0);
  for (const Placement& p : layout.placements()) ++next[static_cast<size_t>(p.rank) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<Placement> by_rank(layout.placements().size());
  for (const Placement& p : layout.placements()) by_rank[next[static_cast<size_t>(p.rank)]++] = p;
  const auto between = [&](int64_t size) {
    return bytes_between(layout, options, load, limits, by_rank, static_cast<size_t>(size));
  };
  return {between(1), between(ranks_of_node(layout, options))};
}

}  // namespace distca::plan
