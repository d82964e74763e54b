// Which groups contribute to which key gradients, and where several contributions make a sum.
#include <algorithm>
#include <limits>
#include <span>
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
  size_t server = 0;  // index of the server among those that see rows of the document
};

/// A server, and what its groups see of the row where a document is cut.
struct Server {
  int64_t rank = 0;
  std::vector<const Seeing*> seeing;
};

/// Rows of which the same groups write contributions. Others may add to these.
struct Contributions {
  Placement rows;
  std::vector<const Seeing*> writers;  // by server
  std::vector<const Seeing*> groups;   // of a sum: all that contribute to any of the rows
  bool is_sum = false;                 // whether several groups contribute
  bool is_narrow = false;              // whether those of other ranks travel in the dtype of the heads

  bool goes_on_in(const Contributions& next) const {
    return !writers.empty() && is_sum == next.is_sum && is_narrow == next.is_narrow && writers == next.writers;
  }
};

/// Goes over a document's rows, and knows which groups see the row where it is.
class Sweep {
 public:
  /// Begins before the first row. Groups come by number, so that those of a server follow each other.
  void start(std::span<Seeing> groups, std::span<const Group> all) {
    cuts_.clear();
    num_servers_ = 0;
    by_begin_.clear();
    for (Seeing& s : groups) {
      cuts_.push_back(s.begin);
      cuts_.push_back(s.end);
      by_begin_.push_back(&s);
      const int64_t rank = all[s.group].server;
      if (num_servers_ == 0 || servers_[num_servers_ - 1].rank != rank) {
        if (num_servers_ == servers_.size()) servers_.emplace_back();
        servers_[num_servers_].rank = rank;
        servers_[num_servers_++].seeing.clear();
      }
      s.server = num_servers_ - 1;
    }
    by_end_ = by_begin_;
    std::ranges::sort(cuts_);
    std::ranges::sort(by_begin_, {}, &Seeing::begin);
    std::ranges::sort(by_end_, {}, &Seeing::end);
    num_begun_ = num_ended_ = 0;
  }

  /// The first row after `row` where a group begins or ends; of a document without one, past all rows.
  int64_t next_cut(int64_t row) const {
    const auto cut = std::ranges::upper_bound(cuts_, row);
    return cut == cuts_.end() ? std::numeric_limits<int64_t>::max() : *cut;
  }

  /// The servers, ascending, and which of their groups see the row where the sweep is.
  std::span<const Server> servers() const { return std::span(servers_).first(num_servers_); }

  /// The groups that begin to see rows where the sweep is, and did not where it was before.
  std::span<const Seeing* const> joined() const { return joined_; }

  /// Goes on to a row that is not before the last one.
  void go_to(int64_t row) {
    joined_.clear();
    for (; num_begun_ < by_begin_.size() && by_begin_[num_begun_]->begin <= row; ++num_begun_) {
      const Seeing* const s = by_begin_[num_begun_];
      auto& seeing = servers_[s->server].seeing;
      seeing.insert(std::ranges::upper_bound(seeing, s), s);
      if (s->end > row) joined_.push_back(s);
    }
    for (; num_ended_ < by_end_.size() && by_end_[num_ended_]->end <= row; ++num_ended_) {
      const Seeing* const s = by_end_[num_ended_];
      auto& seeing = servers_[s->server].seeing;
      seeing.erase(std::ranges::lower_bound(seeing, s));
    }
  }

 private:
  std::vector<int64_t> cuts_;
  std::vector<const Seeing*> by_begin_, by_end_;
  size_t num_begun_ = 0, num_ended_ = 0;
  std::vector<Server> servers_;  // those of an earlier document, after num_servers_, keep their memory
  size_t num_servers_ = 0;
  std::vector<const Seeing*> joined_;
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
      split(document, std::span<Seeing>(begin, end));
      begin = end;
    }
  }

  /// Cuts the rows of one document and head range where other groups begin to contribute. What further groups of a
  /// server add to the contribution of its first one makes no cut.
  void split(int64_t document, std::span<Seeing> groups) {
    sweep_.start(groups, a_.groups);
    for (const Placement& p : layout_.placements(document)) {
      Contributions all;
      for (int64_t row = p.begin; row < p.end;) {
        const int64_t end = std::min(p.end, sweep_.next_cut(row));
        sweep_.go_to(row);
        Contributions next = contributions_to(p.within(row, end));
        if (all.goes_on_in(next)) {
          all.rows.end = end;
          all.groups.insert(all.groups.end(), sweep_.joined().begin(), sweep_.joined().end());
        } else {
          add(all);
          all = std::move(next);
          if (all.is_sum)
            for (const Server& server : sweep_.servers())
              all.groups.insert(all.groups.end(), server.seeing.begin(), server.seeing.end());
        }
        row = end;
      }
      add(all);
    }
  }

  /// What several groups of a server contribute is one contribution of it, in fp32. With a narrow `reduce_dtype` each
  /// group has one of its own in the dtype of the heads, where these have fewer bytes.
  Contributions contributions_to(const Placement& rows) const {
    Contributions found{rows};
    int64_t num_groups = 0, num_remote_groups = 0, num_remote_servers = 0;
    for (const Server& server : sweep_.servers()) {
      const auto number = std::ssize(server.seeing);
      num_groups += number;
      if (server.rank == rows.rank || number == 0) continue;
      num_remote_groups += number;
      ++num_remote_servers;
    }
    found.is_sum = num_groups > 1;
    // With a `reduce_dtype` of fp32 this is never so.
    found.is_narrow =
        num_remote_groups * dtype_bytes(options_.reduce_dtype) < num_remote_servers * dtype_bytes(DType::kFloat32);
    for (const Server& server : sweep_.servers()) {
      if (server.seeing.empty()) continue;
      const bool all_write = found.is_narrow && server.rank != rows.rank;
      found.writers.insert(found.writers.end(), server.seeing.begin(),
                           all_write ? server.seeing.end() : server.seeing.begin() + 1);
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
  void add(Contributions& of) {
    const Placement& rows = of.rows;
    const auto is_own = [&](const Seeing* s) { return group_of(*s).server == rows.rank; };
    if (!of.is_sum) {
      for (const Seeing* s : of.writers) draft(*s, rows, is_own(s) ? GradTarget::kReturned : GradTarget::kArena);
      return;
    }
    std::ranges::sort(of.groups);
    // The home's own contribution goes straight into the sum. Without one, the first contribution that arrives does.
    const auto own = std::ranges::find_if(of.writers, is_own);
    const Seeing* const starts = own == of.writers.end() ? of.writers.front() : *own;
    const Group& g = group_of(*starts);
    const auto sum = std::ssize(a_.sums);
    a_.sums.push_back({rows.rank, is_own(starts) && of.writers.size() == 1, rows.row, rows.end - rows.begin,
                       g.kv_head_begin, g.kv_head_end, -1, -1});
    for (const Seeing* s : of.writers) {
      // What starts a sum at its home is in fp32, as the sum is. All terms that come to it have one dtype.
      const bool narrow = of.is_narrow && !is_own(s);
      const size_t written = drafts_.size();
      KeyGradient& gradient = draft(*s, rows, narrow ? GradTarget::kArena : GradTarget::kPartial);
      gradient.sum = sum;
      gradient.is_first = s == starts;
      gradient.place = num_places_++;
      if (narrow) continue;
      const int64_t server = group_of(*s).server;
      auto next = std::ranges::upper_bound(of.groups, s);
      for (; next != of.groups.end() && group_of(**next).server == server; ++next) {
        KeyGradient& added = draft(**next, rows.within((*next)->begin, (*next)->end), GradTarget::kAdded);
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
  Sweep sweep_;  // over a document's rows, of one head range
};

}  // namespace

int64_t split_key_gradients(const Layout& layout, const PlanOptions& options, Arrangement& arrangement) {
  return Splitter(layout, options, arrangement).run();
}

}  // namespace distca::plan
