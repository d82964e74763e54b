#include "plan/head_parallel.h"

#include <algorithm>
#include <span>
#include <utility>

#include "common/align.h"
#include "plan/limits.h"
#include "plan/shard.h"

namespace distca::plan {
namespace {

using Wide = __int128;

/// Says how many rows of a document lie on an owner: a rank, or a node.
class RowsOfOwners {
 public:
  RowsOfOwners(std::span<const Placement> placements, int64_t ranks_of_owner) {
    for (const Placement& p : placements) segments_.push_back({p.rank / ranks_of_owner, p.begin, p.end - p.begin, 0});
    std::sort(segments_.begin(), segments_.end(), [](const Segment& a, const Segment& b) {
      return a.owner != b.owner ? a.owner < b.owner : a.begin < b.begin;
    });
    int64_t before = 0;
    for (Segment& s : segments_) before = (s.before = before) + s.num_rows;
  }

  /// Number of document rows [begin, end) that lie on the owner.
  int64_t count(int64_t owner, int64_t begin, int64_t end) const { return below(owner, end) - below(owner, begin); }

 private:
  struct Segment {
    int64_t owner, begin, num_rows;
    int64_t before;  // rows of all segments before this one
  };

  /// Number of rows below `row` that lie on the owner, plus a number that depends on the owner alone.
  int64_t below(int64_t owner, int64_t row) const {
    const auto next = std::upper_bound(segments_.begin(), segments_.end(), std::pair(owner, row),
                                       [](const auto& at, const Segment& s) {
                                         return at.first != s.owner ? at.first < s.owner : at.second <= s.begin;
                                       });
    if (next == segments_.begin()) return 0;
    const Segment& s = next[-1];
    return s.before + (s.owner == owner ? std::min(s.num_rows, row - s.begin) : s.num_rows);
  }

  std::vector<Segment> segments_;
};

/// Weighs what travels if groups compute a document.
class DocumentBytes {
 public:
  DocumentBytes(const Layout& layout, const PlanOptions& options, int64_t document)
      : document_(options.document(layout, document)),
        prices_(prices(options)),
        ranks_per_node_(ranks_of_node(layout, options)),
        is_one_node_(ranks_per_node_ >= layout.num_ranks()),
        of_ranks_(layout.placements(document), 1),
        of_nodes_(layout.placements(document), ranks_per_node_) {}

  Wide operator()(const std::vector<HeadParallelGroup>& groups) {
    Wide bytes = 0;
    key_row_ = groups.size() == 1 ? prices_.sole_key_row : prices_.key_row;
    for (const HeadParallelGroup& g : groups) {
      find_keys(g);
      for (const HeadParallelGroup::Member& m : g.members) {
        const Wide between = is_one_node_ ? 0 : missing(g, of_nodes_, m.rank / ranks_per_node_);
        bytes += (m.head_end - m.head_begin) * weighted_bytes(missing(g, of_ranks_, m.rank), between);
      }
    }
    return bytes;
  }

 private:
  /// Finds the keys that the rows of a group see, as disjoint ranges in ascending order.
  void find_keys(const HeadParallelGroup& g) {
    keys_.clear();
    for (const HeadParallelGroup::Run& r : g.runs) {
      const int64_t begin = document_.mask.first_key(r.begin);
      const int64_t end = document_.mask.end_key(r.end - 1, document_.length);
      if (keys_.empty() || begin > keys_.back().second)
        keys_.emplace_back(begin, end);
      else
        keys_.back().second = std::max(keys_.back().second, end);
    }
  }

  /// The bytes for one head of the rows and keys of a group that do not lie on the owner.
  Wide missing(const HeadParallelGroup& g, const RowsOfOwners& rows, int64_t owner) const {
    int64_t num_rows = 0, num_keys = 0;
    for (const HeadParallelGroup::Run& r : g.runs) num_rows += r.end - r.begin - rows.count(owner, r.begin, r.end);
    for (const auto& [begin, end] : keys_) num_keys += end - begin - rows.count(owner, begin, end);
    return Wide{num_rows} * prices_.query_row + Wide{num_keys} * key_row_;
  }

  const Document document_;
  const Prices prices_;
  const int64_t ranks_per_node_;
  const bool is_one_node_;
  const RowsOfOwners of_ranks_, of_nodes_;
  int64_t key_row_ = 0;
  std::vector<std::pair<int64_t, int64_t>> keys_;
};

/// The ranks of a document in the order of their first rows.
std::vector<int64_t> ranks_of(std::span<const Placement> placements) {
  std::vector<std::pair<int64_t, size_t>> firsts;
  for (size_t i = 0; i < placements.size(); ++i) firsts.emplace_back(placements[i].rank, i);
  std::sort(firsts.begin(), firsts.end());
  firsts.erase(
      std::unique(firsts.begin(), firsts.end(), [](const auto& a, const auto& b) { return a.first == b.first; }),
      firsts.end());
  std::sort(firsts.begin(), firsts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<int64_t> ranks;
  for (const auto& [rank, first] : firsts) ranks.push_back(rank);
  return ranks;
}

/// Whether ranks may exchange rows of the document for heads. Short segments would become tasks of as few rows and many
/// small messages. A rank that does not serve gives all of its rows away in any case. Keys that documents share would
/// travel to the servers of each.
bool may_exchange(const Layout& layout, const PlanOptions& options, const std::vector<int64_t>& speeds,
                  int64_t document) {
  const auto placements = layout.placements(document);
  return placements.size() > 1 && !layout.shares_rows(document) &&
         layout.document_lengths()[static_cast<size_t>(document)] / std::ssize(placements) >= options.min_rows &&
         std::all_of(placements.begin(), placements.end(),
                     [&](const Placement& p) { return speeds[static_cast<size_t>(p.rank)] > 0; });
}

/// Chooses for one document after another.
class Chooser {
 public:
  Chooser(const Layout& layout, const PlanOptions& options, Saves saves)
      : layout_(layout),
        options_(options),
        saves_(saves),
        num_heads_(head_groups(options).num_groups),
        has_nodes_(ranks_of_node(layout, options) < layout.num_ranks()) {
    for (const Placement& p : layout.placements()) num_rows_ += p.end - p.begin;
  }

  HeadParallel operator()(int64_t document) const {
    const auto placements = layout_.placements(document);
    const int64_t num_ranks = std::ssize(ranks_of(placements));
    // Where all rows of a rank lie in segments as long as these, it has no more than kMostTasks tasks.
    const Wide length = layout_.document_lengths()[static_cast<size_t>(document)];
    const Wide few_tasks = length * kMostTasks * layout_.num_ranks() / (Wide{num_rows_} * std::ssize(placements));
    const auto most = static_cast<int64_t>(std::min(Wide{std::min(num_ranks, num_heads_)}, few_tasks));
    if (most <= 1) return {};
    HeadParallel how = {static_cast<int32_t>(most), false};
    if (saves_ == Saves::kBytes) how = of_fewest_bytes(document, most);
    // Groups are even. Nine ranks in groups of at most eight are groups of four and five.
    int32_t largest = 1;
    for (const HeadParallelGroup& g : head_parallel_groups(layout_, options_, document, how))
      largest = std::max(largest, static_cast<int32_t>(g.members.size()));
    how.group_size = largest;
    return how;
  }

 private:
  static constexpr int64_t kMostTasks = 4096;
  static constexpr int64_t kLeastGain = 8;  // exchanging must save one of so many bytes

  HeadParallel of_fewest_bytes(int64_t document, int64_t most) const {
    DocumentBytes bytes_of(layout_, options_, document);
    const auto bytes = [&](HeadParallel how) {
      return bytes_of(head_parallel_groups(layout_, options_, document, how));
    };
    HeadParallel best;
    // Results of exchanged rows travel after attention, when those of rows at home are there.
    Wide fewest = bytes(best) * (kLeastGain - 1) / kLeastGain + 1;
    for (int64_t size = 2; size <= most; ++size) {
      if (num_heads_ % size != 0 && size != most) continue;
      for (bool within_nodes : {false, true}) {
        if (within_nodes && !has_nodes_) continue;
        const HeadParallel how = {static_cast<int32_t>(size), within_nodes};
        const Wide moved = bytes(how);
        if (moved >= fewest) continue;
        fewest = moved;
        best = how;
      }
    }
    return best;
  }

  const Layout& layout_;
  const PlanOptions& options_;
  const Saves saves_;
  const int64_t num_heads_;
  const bool has_nodes_;
  int64_t num_rows_ = 0;
};

}  // namespace

std::vector<HeadParallelGroup> head_parallel_groups(const Layout& layout, const PlanOptions& options, int64_t document,
                                                    HeadParallel how) {
  const auto placements = layout.placements(document);
  const auto first = static_cast<int32_t>(placements.data() - layout.placements().data());
  const std::vector<int64_t> ranks = ranks_of(placements);
  const int64_t num_heads = head_groups(options).num_groups, ranks_per_node = ranks_of_node(layout, options);
  std::vector<HeadParallelGroup> groups;
  std::vector<std::pair<int64_t, size_t>> group_of;  // of each rank
  for (size_t begin = 0; begin < ranks.size();) {
    size_t end = begin + 1;  // the ranks that are divided evenly: all, or those that follow each other on a node
    while (end < ranks.size() && !(how.within_nodes && ranks[end] / ranks_per_node != ranks[begin] / ranks_per_node))
      ++end;
    const auto n = static_cast<int64_t>(end - begin), num_groups = ceil_div(n, how.group_size);
    for (int64_t i = 0; i < num_groups; ++i) {
      const int64_t from = n * i / num_groups, size = n * (i + 1) / num_groups - from;
      HeadParallelGroup& group = groups.emplace_back();
      for (int64_t m = 0; m < size; ++m) {
        const int64_t rank = ranks[begin + static_cast<size_t>(from + m)];
        group_of.emplace_back(rank, groups.size() - 1);
        group.members.push_back({static_cast<int32_t>(rank), static_cast<int32_t>(num_heads * m / size),
                                 static_cast<int32_t>(num_heads * (m + 1) / size)});
      }
    }
    begin = end;
  }
  std::sort(group_of.begin(), group_of.end());
  for (size_t i = 0; i < placements.size(); ++i) {
    const Placement& p = placements[i];
    auto& runs = groups[std::lower_bound(group_of.begin(), group_of.end(), std::pair(p.rank, size_t{0}))->second].runs;
    if (options.cost.is_additive() && !runs.empty() && runs.back().end == p.begin)
      runs.back().end = p.end;
    else
      runs.push_back({first + static_cast<int32_t>(i), p.begin, p.end});
  }
  return groups;
}

std::vector<HeadParallel> choose_head_parallel(const Layout& layout, const PlanOptions& options, Saves saves) {
  const bool all_whole = std::ssize(layout.placements()) == layout.num_documents();
  if (!options.balance || head_groups(options).num_groups == 1 || all_whole) return {};
  const std::vector<int64_t> speeds = server_speeds(layout, options);
  const Chooser choose(layout, options, saves);
  std::vector<HeadParallel> chosen;
  for (int64_t d = 0; d < layout.num_documents(); ++d) {
    if (!may_exchange(layout, options, speeds, d)) continue;
    const HeadParallel how = choose(d);
    if (how.group_size == 1) continue;
    chosen.resize(static_cast<size_t>(layout.num_documents()));
    chosen[static_cast<size_t>(d)] = how;
  }
  return chosen;
}

}  // namespace distca::plan
