// Which groups contribute to which key gradients, and where several contributions make a sum.
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/arrangement.h"

namespace distca::plan {
namespace {

/// Own rows [begin, end) of a document that a group sees, as its keys from `begin + shift` on.
struct Seeing {
  uint32_t group = 0;
  int64_t begin = 0, end = 0;
  int64_t shift = 0;
};

/// Rows of which the same groups write contributions. Others may add to these.
struct Contributions {
  Placement rows;
  std::vector<const Seeing*> writers;  // by server
  bool is_sum = false;                 // whether several groups contribute

  bool goes_on_in(const Contributions& next) const {
    return !writers.empty() && is_sum == next.is_sum && writers == next.writers;
  }
};

class Splitter {
 public:
  Splitter(const Layout& layout, const PlanOptions& options, Arrangement& arrangement)
      : layout_(layout), options_(options), a_(arrangement) {}

  int64_t run() {
    for (int64_t d = 0; d < layout_.num_documents(); ++d) split(d);
    put_in_order();
    return num_places_;
  }

 private:
  const Group& group_of(const Seeing& s) const { return a_.groups[s.group]; }

  void split(int64_t document) {
    by_heads_.clear();
    layout_.for_each_reader(document, [&](const SharedRows& rows) {
      for (uint32_t i : a_.groups_of_document[rows.document]) {
        const int64_t begin = std::max(a_.groups[i].kv_begin - rows.shift(), rows.begin);
        const int64_t end = std::min(a_.groups[i].kv_end - rows.shift(), rows.end);
        if (begin < end) by_heads_.push_back({i, begin, end, rows.shift()});
      }
    });
    std::sort(by_heads_.begin(), by_heads_.end(), [&](const Seeing& x, const Seeing& y) {
      return std::tuple(group_of(x).kv_head_begin, x.group, x.begin) <
             std::tuple(group_of(y).kv_head_begin, y.group, y.begin);
    });
    for (auto begin = by_heads_.begin(); begin != by_heads_.end();) {
      const auto end = std::find_if(begin, by_heads_.end(), [&](const Seeing& s) {
        return group_of(s).kv_head_begin != group_of(*begin).kv_head_begin;
      });
      split(document, {begin, end});
      begin = end;
    }
  }

  /// Cuts the rows of one document and head range where other groups begin to contribute. What further groups of a
  /// server add to the contribution of its first one makes no cut.
  void split(int64_t document, std::span<const Seeing> groups) {
    cuts_.clear();
    for (const Seeing& s : groups) {
      cuts_.push_back(s.begin);
      cuts_.push_back(s.end);
    }
    std::sort(cuts_.begin(), cuts_.end());
    for (const Placement& p : layout_.placements(document)) {
      Contributions all;
      for (int64_t row = p.begin; row < p.end;) {
        const auto cut = std::upper_bound(cuts_.begin(), cuts_.end(), row);
        const int64_t end = cut == cuts_.end() ? p.end : std::min(p.end, *cut);
        Contributions next = contributions_to(groups, p.within(row, end));
        if (all.goes_on_in(next)) {
          all.rows.end = end;
        } else {
          add(groups, all);
          all = std::move(next);
        }
        row = end;
      }
      add(groups, all);
    }
  }

  /// What several groups of a server contribute is one contribution of it, in fp32, unless contributions travel in the
  /// dtype of the heads.
  Contributions contributions_to(std::span<const Seeing> groups, const Placement& rows) const {
    Contributions found{rows, {}};
    int64_t last = -1;  // server
    for (const Seeing& s : groups) {
      if (s.begin > rows.begin || rows.end > s.end) continue;
      const int64_t server = group_of(s).server;
      if (server != last || (options_.reduces_narrow() && server != rows.rank)) found.writers.push_back(&s);
      found.is_sum = last >= 0;
      last = server;
    }
    return found;
  }

  KeyGradient& draft(const Seeing& s, const Placement& rows, GradTarget target) {
    KeyGradient& gradient = drafts_.emplace_back();
    gradient.group = s.group;
    gradient.begin = rows.begin + s.shift;
    gradient.end = rows.end + s.shift;
    gradient.document = rows.document;
    gradient.shift = s.shift;
    gradient.home = rows.rank;
    gradient.home_row = rows.row;
    gradient.target = target;
    gradient.last_round = group_of(s).round;
    return gradient;
  }

  /// Adds the gradients of rows to which the same groups contribute.
  void add(std::span<const Seeing> groups, const Contributions& of) {
    const Placement& rows = of.rows;
    const auto is_own = [&](const Seeing* s) { return group_of(*s).server == rows.rank; };
    if (!of.is_sum) {
      for (const Seeing* s : of.writers) draft(*s, rows, is_own(s) ? GradTarget::kReturned : GradTarget::kArena);
      return;
    }
    // The home's own contribution goes straight into the sum. Without one, the first contribution that arrives does.
    const auto own = std::ranges::find_if(of.writers, is_own);
    const Seeing* const starts = own == of.writers.end() ? of.writers.front() : *own;
    const Group& g = group_of(*starts);
    const auto sum = std::ssize(a_.sums);
    a_.sums.push_back({rows.rank, is_own(starts) && of.writers.size() == 1, rows.row, rows.end - rows.begin,
                       g.kv_head_begin, g.kv_head_end, -1, -1});
    for (const Seeing* s : of.writers) {
      // What starts a sum at its home is in fp32, as the sum is. All terms that are added have one dtype.
      const bool narrow = options_.reduces_narrow() && !is_own(s);
      const size_t written = drafts_.size();
      KeyGradient& gradient = draft(*s, rows, narrow ? GradTarget::kArena : GradTarget::kPartial);
      gradient.sum = sum;
      gradient.is_first = s == starts;
      gradient.place = num_places_++;
      if (narrow) continue;
      const int64_t server = group_of(*s).server;
      for (const Seeing* next = s + 1; next != groups.data() + groups.size() && group_of(*next).server == server;
           ++next) {
        const Placement seen = rows.within(next->begin, next->end);
        if (seen.begin >= seen.end) continue;
        KeyGradient& added = draft(*next, seen, GradTarget::kAdded);
        added.sum = sum;
        added.place = drafts_[written].place;
        drafts_[written].last_round = added.last_round;  // groups of a server come by round
      }
    }
  }

  /// Sorts the gradients by group and row.
  void put_in_order() {
    if (layout_.has_shared())  // rows that a document has of others may be of documents with higher numbers
      std::stable_sort(drafts_.begin(), drafts_.end(),
                       [](const KeyGradient& x, const KeyGradient& y) { return x.begin < y.begin; });
    Buckets by_group;
    by_group.fill(a_.groups.size(), drafts_.size(), [&](size_t i) { return drafts_[i].group; });
    a_.gradients.reserve(drafts_.size());
    for (size_t g = 0; g < a_.groups.size(); ++g) {
      a_.groups[g].gradient_begin = a_.gradients.size();
      for (uint32_t i : by_group[static_cast<int64_t>(g)]) a_.gradients.push_back(drafts_[i]);
      a_.groups[g].gradient_end = a_.gradients.size();
    }
    // Gradients that stay where they are go to a bucket of their own.
    const auto n = static_cast<size_t>(layout_.num_ranks());
    a_.gradients_of_home.fill(n + 1, a_.gradients.size(), [&](size_t i) {
      const KeyGradient& g = a_.gradients[i];
      return g.is_added() || a_.groups[g.group].server == g.home ? static_cast<int64_t>(n) : g.home;
    });
    a_.own_sums_of_home.fill(n + 1, a_.sums.size(),
                             [&](size_t i) { return a_.sums[i].is_own ? a_.sums[i].home : static_cast<int64_t>(n); });
  }

  const Layout& layout_;
  const PlanOptions& options_;
  Arrangement& a_;
  std::vector<KeyGradient> drafts_;
  int64_t num_places_ = 0;  // of contributions
  std::vector<Seeing> by_heads_;
  std::vector<int64_t> cuts_;
};

}  // namespace

int64_t split_key_gradients(const Layout& layout, const PlanOptions& options, Arrangement& arrangement) {
  return Splitter(layout, options, arrangement).run();
}

}  // namespace distca::plan
