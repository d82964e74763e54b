#include "plan/draft.h"

#include <algorithm>
#include <span>
#include <optional>
#include <utility>

#include "plan/head_parallel.h"
#include "plan/limits.h"

namespace distca::plan {
namespace {

using Wide = __int128;
constexpr int kGentleRounds = 24;  // from this round on, a rank that needs too much exchanges nothing
constexpr int kRounds = 40;
constexpr int64_t kMarginPpm = 1000;  // loads that differ by less than this are alike

Draft draft_of(const Layout& layout, const PlanOptions& options, const std::vector<int32_t>& degrees,
               const Allowances& allowances = {}) {
  Draft draft;
  Scheduler scheduler(layout, options, degrees, allowances);
  draft.tasks = scheduler.schedule();
  draft.arrangement = arrange(layout, options, draft.tasks);
  draft.degrees = degrees;
  draft.exchanged = scheduler.exchanged();
  draft.is_balanced = scheduler.all_within_limits();
  return draft;
}

bool fits(const Draft& draft, const PlanOptions& options) {
  return draft.arrangement.slot_bytes() <= options.capacity;
}

/// Finds allowances under which all ranks fit. They become smaller from round to round.
class Fitter {
 public:
  /// `least_bytes` are the arenas that remain if nothing is moved for balance.
  Fitter(const Layout& layout, const PlanOptions& options, const std::vector<int64_t>& least_bytes,
         bool level_with_largest)
      : layout_(layout), options_(options), least_bytes_(least_bytes) {
    const auto n = least_bytes.size();
    allowed_ = {std::vector<int64_t>(n, kNoLimit), std::vector<int64_t>(n, kNoLimit), level_with_largest};
  }

  /// Returns a draft that fits, or nothing if none was found.
  std::optional<Draft> run(const Draft& first) {
    restrict(first, false);
    for (int round = 1; round < kRounds; ++round) {
      Draft draft = draft_of(layout_, options_, first.degrees, allowed_);
      if (!restrict(draft, round >= kGentleRounds)) return draft;
    }
    return std::nullopt;
  }

 private:
  /// Lowers the allowances of ranks that need too much. Returns false if there are none.
  bool restrict(const Draft& draft, bool sternly) {
    const Allowances& used = draft.exchanged;
    bool restricted = false;
    for (size_t r = 0; r < least_bytes_.size(); ++r) {
      const int64_t bytes = draft.arrangement.arena_bytes(r);
      if (bytes <= options_.capacity) continue;
      restricted = true;
      if (allowed_.in[r] == 0 && allowed_.out[r] == 0) {
        keep_documents_at_home(static_cast<int64_t>(r));
        continue;
      }
      // What a rank exchanges may take the room above the arena that it needs in any case. Its allowance becomes a
      // little less than what fits there.
      const int64_t room = std::max<int64_t>(0, options_.capacity - least_bytes_[r]);
      const auto less = [&](int64_t amount) {
        return sternly ? 0 : static_cast<int64_t>(Wide{amount} * room / (bytes - least_bytes_[r]) * 31 / 32);
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

  const Layout& layout_;
  const PlanOptions& options_;
  Allowances allowed_;
  const std::vector<int64_t>& least_bytes_;
};

/// Whether the largest load of `a`, after division by speeds, is smaller than that of `b` by more than this share of it.
bool is_better_balanced(const Layout& layout, const PlanOptions& options, const Draft& a, const Draft& b,
                        int64_t margin_ppm = 0) {
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
  return Wide{x} * y_speed * 1'000'000 < Wide{y} * x_speed * (1'000'000 - margin_ppm);
}

/// The bytes that a draft moves under the objective, as if nothing were retained: what ranks keep must not change who
/// computes what. Those between nodes count kNodeFactor times.
Wide weighted_bytes(const Layout& layout, const PlanOptions& options, const Draft& draft) {
  PlanOptions forgetful = options;
  forgetful.retain_bytes.clear();
  const Arrangement again = options.retains() ? arrange(layout, forgetful, draft.tasks) : Arrangement();
  const Arrangement& a = options.retains() ? again : draft.arrangement;
  const size_t num_messages = options.objective == Objective::kForward ? 2 : a.bytes.size();
  Wide bytes = 0;
  for (size_t m = 0; m < num_messages; ++m) bytes += a.bytes[m] + Wide{kNodeFactor - 1} * a.bytes_between_nodes[m];
  return bytes;
}

bool is_better(const Layout& layout, const PlanOptions& options, const Draft& a, const Draft& b) {
  // Where single rows keep both from the tolerance, a row more or less is not worth many bytes.
  if (!a.is_balanced || !b.is_balanced) {
    if (is_better_balanced(layout, options, a, b, kMarginPpm)) return true;
    if (is_better_balanced(layout, options, b, a, kMarginPpm)) return false;
  }
  return weighted_bytes(layout, options, a) < weighted_bytes(layout, options, b);
}

/// Returns the first balanced draft that fits. Where there is none, drafts are changed until they fit, and the best
/// balanced result is taken.
Draft fit(const Layout& layout, const PlanOptions& options, std::span<const Draft> drafts) {
  for (const Draft& draft : drafts)
    if (draft.is_balanced && fits(draft, options)) return draft;
  PlanOptions unbalanced = options;
  unbalanced.balance = false;
  std::optional<Draft> best;
  std::vector<Draft> too_large;  // those without balance
  const auto consider = [&](Draft draft) {
    if (!best || is_better_balanced(layout, options, draft, *best)) best = std::move(draft);
  };
  for (const Draft& draft : drafts) {
    if (fits(draft, options)) {
      consider(draft);
      continue;
    }
    // Where servers are given, rows may not be computed at home.
    std::vector<int64_t> least_bytes(static_cast<size_t>(layout.num_ranks()), 0);
    if (options.servers.empty()) {
      Draft least = draft_of(layout, unbalanced, draft.degrees);
      for (size_t r = 0; r < least_bytes.size(); ++r) least_bytes[r] = least.arrangement.arena_bytes(r);
      if (!fits(least, options)) {
        too_large.push_back(std::move(least));
        continue;
      }
      consider(std::move(least));
    }
    for (bool level_with_largest : {false, true})
      if (auto found = Fitter(layout, options, least_bytes, level_with_largest).run(draft)) consider(std::move(*found));
  }
  if (!best) {
    too_large.insert(too_large.end(), drafts.begin(), drafts.end());
    const auto smallest = std::min_element(too_large.begin(), too_large.end(), [](const Draft& a, const Draft& b) {
      return a.arrangement.slot_bytes() < b.arrangement.slot_bytes();
    });
    check_capacity(smallest->arrangement, options.capacity);  // throws, with bytes that are enough
  }
  return std::move(*best);
}

}  // namespace

void check_capacity(const Arrangement& arrangement, int64_t capacity) {
  const size_t neediest = arrangement.neediest_rank();
  const int64_t bytes = arrangement.arena_bytes(neediest);
  require<CapacityError>(bytes <= capacity, "plan: rank ", neediest, " needs an arena of ", bytes,
                         " bytes a slot, but the capacity is ", capacity,
                         " bytes; give distca.init heap_bytes >= ", 2 * bytes, " (two slots), or fewer tokens");
}

Draft make_draft(const Layout& layout, const PlanOptions& options) {
  std::vector<Draft> drafts;
  drafts.push_back(draft_of(layout, options, {}));
  const std::vector<int32_t> degrees = head_parallel_degrees(layout, options, Saves::kBytes);
  if (!degrees.empty()) {
    drafts.push_back(draft_of(layout, options, degrees));
    if (is_better(layout, options, drafts[1], drafts[0])) std::swap(drafts[0], drafts[1]);
  }
  const int64_t wanted = drafts[0].arrangement.slot_bytes();
  const auto neediest = static_cast<int64_t>(drafts[0].arrangement.neediest_rank());
  if (!fits(drafts[0], options)) {
    const std::vector<int32_t> largest = head_parallel_degrees(layout, options, Saves::kMemory);
    if (largest != degrees) drafts.push_back(draft_of(layout, options, largest));
    drafts[0] = fit(layout, options, drafts);
  }
  drafts[0].wanted_slot_bytes = wanted;
  drafts[0].neediest_rank = neediest;
  return std::move(drafts[0]);
}

}  // namespace distca::plan
