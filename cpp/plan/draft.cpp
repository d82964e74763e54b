#include "plan/draft.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "plan/limits.h"
#include "plan/scheduler.h"

namespace distca::plan {
namespace {

using Wide = __int128;
constexpr int kGentleRounds = 24;  // from this round on, a rank that needs too much exchanges nothing
constexpr int kRounds = 40;

Draft draft_of(const Layout& layout, const PlanOptions& options, const Allowances& allowances = {}) {
  Draft draft;
  draft.tasks = Scheduler(layout, options, allowances).schedule();
  draft.arrangement = arrange(layout, options, draft.tasks);
  return draft;
}

/// Finds allowances under which all ranks fit. They become smaller from round to round.
class Fitter {
 public:
  Fitter(const Layout& layout, const PlanOptions& options, const std::vector<int64_t>& at_home_bytes,
         bool level_with_largest)
      : layout_(layout), options_(options), at_home_bytes_(at_home_bytes) {
    const auto n = at_home_bytes.size();
    allowed_ = {std::vector<int64_t>(n, kNoLimit), std::vector<int64_t>(n, kNoLimit), level_with_largest};
  }

  /// Returns a draft that fits, or nothing if none was found.
  std::optional<Draft> run(const Draft& first) {
    restrict(first, false);
    for (int round = 1; round < kRounds; ++round) {
      Draft draft = draft_of(layout_, options_, allowed_);
      if (!restrict(draft, round >= kGentleRounds)) return draft;
    }
    return std::nullopt;
  }

 private:
  /// Lowers the allowances of ranks that need too much. Returns false if there are none.
  bool restrict(const Draft& draft, bool sternly) {
    const Allowances used = exchanged(draft.tasks);
    bool restricted = false;
    for (size_t r = 0; r < at_home_bytes_.size(); ++r) {
      const int64_t bytes = draft.arrangement.arena_bytes(r);
      if (bytes <= options_.capacity) continue;
      restricted = true;
      if (allowed_.in[r] == 0 && allowed_.out[r] == 0) {
        keep_documents_at_home(static_cast<int64_t>(r));
        continue;
      }
      // What a rank exchanges may take the room above the arena that the layout itself forces. Its allowance becomes a
      // little less than what fits there.
      const int64_t room = std::max<int64_t>(0, options_.capacity - at_home_bytes_[r]);
      const auto less = [&](int64_t amount) {
        return sternly ? 0 : static_cast<int64_t>(Wide{amount} * room / (bytes - at_home_bytes_[r]) * 31 / 32);
      };
      allowed_.in[r] = std::min(allowed_.in[r], less(used.in[r]));
      allowed_.out[r] = std::min(allowed_.out[r], less(used.out[r]));
    }
    return restricted;
  }

  /// Keeps all documents at home that the rank has rows of. A rank that exchanges nothing itself may still get
  /// gradients of its keys from too many servers of others' rows.
  void keep_documents_at_home(int64_t rank) {
    for (const Placement& p : layout_.placements()) {
      if (p.rank != rank) continue;
      for (const Placement& other : layout_.placements(p.document)) allowed_.out[static_cast<size_t>(other.rank)] = 0;
    }
  }

  /// The cost that each rank computes of others' rows, and that others compute of its rows.
  Allowances exchanged(const std::vector<Task>& tasks) const {
    const std::vector<int64_t> nothing(at_home_bytes_.size(), 0);
    Allowances used = {nothing, nothing};
    for (const Task& t : tasks) {
      if (t.server == t.home) continue;
      const int64_t groups = (t.kv_head_end - t.kv_head_begin) / head_groups(options_).heads_of_group;
      const int64_t cost = groups * options_.cost.cost(options_.document(layout_, t.document), t.q_begin, t.q_end);
      used.in[static_cast<size_t>(t.server)] += cost;
      used.out[static_cast<size_t>(t.home)] += cost;
    }
    return used;
  }

  const Layout& layout_;
  const PlanOptions& options_;
  Allowances allowed_;
  const std::vector<int64_t>& at_home_bytes_;
};

/// Whether the largest load of `a`, after division by speeds, is smaller than that of `b`.
bool is_better_balanced(const Layout& layout, const PlanOptions& options, const Draft& a, const Draft& b) {
  const std::vector<int64_t> speeds = server_speeds(layout, options);
  const auto largest = [&](const Draft& draft) {
    std::vector<int64_t> load(speeds.size(), 0);
    for (const Task& t : draft.tasks) {
      load[static_cast<size_t>(t.server)] +=
          (t.kv_head_end - t.kv_head_begin) *
          options.cost.cost(options.document(layout, t.document), t.q_begin, t.q_end);
    }
    std::pair<int64_t, int64_t> found = {0, 1};
    for (size_t r = 0; r < load.size(); ++r)
      if (Wide{load[r]} * found.second > Wide{found.first} * speeds[r]) found = {load[r], speeds[r]};
    return found;
  };
  const auto [x, x_speed] = largest(a);
  const auto [y, y_speed] = largest(b);
  return Wide{x} * y_speed < Wide{y} * x_speed;
}

}  // namespace

void check_capacity(const Arrangement& arrangement, int64_t capacity) {
  const size_t neediest = arrangement.neediest_rank();
  const int64_t bytes = arrangement.arena_bytes(neediest);
  require<CapacityError>(bytes <= capacity, "plan: rank ", neediest, " needs an arena of ", bytes,
                         " bytes a slot, but the capacity is ", capacity,
                         " bytes; give distca.init heap_bytes >= ", 2 * bytes, " (two slots), or fewer tokens");
}

Draft fit(const Layout& layout, const PlanOptions& options, const Draft& draft) {
  std::optional<Draft> best;
  // What the layout itself forces. It is nothing where servers are given, because then rows may not be computed at
  // home.
  std::vector<int64_t> at_home_bytes(static_cast<size_t>(layout.num_ranks()), 0);
  if (options.servers.empty()) {
    PlanOptions unbalanced = options;
    unbalanced.balance = false;
    best = draft_of(layout, unbalanced);
    const Arrangement& at_home = best->arrangement;
    check_capacity(at_home.slot_bytes() < draft.arrangement.slot_bytes() ? at_home : draft.arrangement,
                   options.capacity);
    for (size_t r = 0; r < at_home_bytes.size(); ++r) at_home_bytes[r] = at_home.arena_bytes(r);
  }
  for (bool level_with_largest : {false, true}) {
    auto found = Fitter(layout, options, at_home_bytes, level_with_largest).run(draft);
    if (found && (!best || is_better_balanced(layout, options, *found, *best))) best = std::move(found);
  }
  if (!best) check_capacity(draft.arrangement, options.capacity);  // throws, with bytes that are enough
  return std::move(*best);
}

}  // namespace distca::plan
