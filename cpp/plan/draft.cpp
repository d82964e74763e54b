#include "plan/draft.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "plan/head_parallel.h"
#include "plan/limits.h"

namespace distca::plan {
namespace {

using Wide = __int128;
constexpr int kGentleRounds = 24;  // from this round on, a rank that needs too much exchanges nothing
constexpr int kRounds = 40;

Draft draft_of(const Layout& layout, const PlanOptions& options, const Approach& approach,
               const Allowances& allowances = {}) {
  Draft draft;
  Scheduler scheduler(layout, options, approach, allowances);
  draft.tasks = scheduler.schedule();
  draft.arrangement = arrange(layout, options, draft.tasks);
  draft.approach = approach;
  draft.exchanged = scheduler.exchanged();
  return draft;
}

bool fits(const Draft& draft, const PlanOptions& options) { return draft.arrangement.slot_bytes() <= options.capacity; }

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
      Draft draft = draft_of(layout_, options_, first.approach, allowed_);
      const Allowances before = allowed_;
      if (!restrict(draft, round >= kGentleRounds)) return draft;
      // Under the same allowances the same draft would come again, until ranks are treated sternly.
      if (allowed_ == before && round < kGentleRounds) {
        round = kGentleRounds;
        restrict(draft, true);
      }
      if (allowed_ == before) break;
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
      const auto less = [&](int64_t amount) {  // with rates, parts that came back may cost more than what left
        const Wide used_up = std::max<int64_t>(0, amount);
        return sternly ? 0 : static_cast<int64_t>(used_up * room / (bytes - least_bytes_[r]) * 31 / 32);
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
      layout_.for_each_reader(p.document, [&](const SharedRows& reader) {
        for (const Placement& other : layout_.placements(reader.document))
          allowed_.out[static_cast<size_t>(other.rank)] = 0;
      });
    }
  }

  const Layout& layout_;
  const PlanOptions& options_;
  Allowances allowed_;
  const std::vector<int64_t>& least_bytes_;
};

/// Compares drafts.
class Comparison {
 public:
  Comparison(const Layout& layout, const PlanOptions& options)
      : layout_(layout), options_(options), speeds_(server_speeds(layout, options)) {}

  /// Whether no load is above its limit.
  bool is_balanced(const Draft& draft) const {
    const std::vector<int64_t> load = loads(draft);
    const int64_t total = std::accumulate(load.begin(), load.end(), int64_t{0});
    return std::ranges::equal(load, load_limits(total, speeds_, options_.tolerance_ppm), std::less_equal());
  }

  /// A balanced draft is better than one that is not. Of two that are alike in this, the one that moves fewer bytes is
  /// better, unless the largest loads differ: where single rows or the capacity keep them from the tolerance, and where
  /// tasks of one of them cost more together.
  bool is_better(const Draft& a, const Draft& b) const {
    const bool balanced = is_balanced(a);
    if (balanced != is_balanced(b)) return balanced;
    if (!balanced || !options_.cost.is_additive()) {
      if (is_lighter(a, b)) return true;
      if (is_lighter(b, a)) return false;
    }
    return bytes(a) < bytes(b);
  }

 private:
  static constexpr int64_t kMarginPpm = 1000;  // loads that differ by less than this are alike

  std::vector<int64_t> loads(const Draft& draft) const {
    std::vector<int64_t> load(speeds_.size(), 0);
    const int64_t heads_of_group = head_groups(options_).heads_of_group;
    for (const Task& t : draft.tasks) {
      load[static_cast<size_t>(t.server)] +=
          (t.kv_head_end - t.kv_head_begin) / heads_of_group *
          options_.cost.cost(options_.document(layout_, t.document), t.q_begin, t.q_end);
    }
    return load;
  }

  /// Whether the largest load of `a`, after division by speeds, is clearly smaller than that of `b`.
  bool is_lighter(const Draft& a, const Draft& b) const {
    const auto largest = [&](const std::vector<int64_t>& load) {
      std::pair<int64_t, int64_t> found = {0, 1};
      for (size_t r = 0; r < load.size(); ++r)
        if (Wide{load[r]} * found.second > Wide{found.first} * speeds_[r]) found = {load[r], speeds_[r]};
      return found;
    };
    const auto [x, x_speed] = largest(loads(a));
    const auto [y, y_speed] = largest(loads(b));
    return Wide{x} * y_speed * 1'000'000 < Wide{y} * x_speed * (1'000'000 - kMarginPpm);
  }

  /// What a draft moves under the objective, weighted, as if nothing were retained: what ranks keep must not change who
  /// computes what.
  Wide bytes(const Draft& draft) const {
    PlanOptions forgetful = options_;
    forgetful.retain_bytes.clear();
    const Arrangement again = options_.retains() ? arrange(layout_, forgetful, draft.tasks) : Arrangement();
    const Arrangement& a = options_.retains() ? again : draft.arrangement;
    const size_t num_messages = options_.objective == Objective::kForward ? 2 : a.bytes.size();
    Wide sum = 0;
    for (size_t m = 0; m < num_messages; ++m) sum += weighted_bytes(a.bytes[m], a.bytes_between_nodes[m]);
    return sum;
  }

  const Layout& layout_;
  const PlanOptions& options_;
  const std::vector<int64_t> speeds_;
};

/// Finds the best draft that fits, where the first one that was made does not.
class BestFit {
 public:
  BestFit(const Layout& layout, const PlanOptions& options)
      : layout_(layout), options_(options), comparison_(layout, options), unbalanced_(options) {
    unbalanced_.balance = false;
  }

  /// Considers the draft as it is, or else what can be made of it.
  void consider(const Draft& draft) {
    if (fits(draft, options_)) return take(draft);
    too_large_.push_back(draft);
    // Where servers are given, rows may not be computed at home.
    std::vector<int64_t> least_bytes(static_cast<size_t>(layout_.num_ranks()), 0);
    if (options_.servers.empty()) {
      Draft least = draft_of(layout_, unbalanced_, draft.approach);
      if (fits(least, options_)) {
        for (size_t r = 0; r < least_bytes.size(); ++r) least_bytes[r] = least.arrangement.arena_bytes(r);
        take(std::move(least));
      } else {
        too_large_.push_back(std::move(least));
      }
    }
    for (bool level_with_largest : {false, true})
      if (auto found = Fitter(layout_, options_, least_bytes, level_with_largest).run(draft)) take(std::move(*found));
  }

  bool is_balanced() const { return best_ && comparison_.is_balanced(*best_); }

  /// Throws CapacityError, which names bytes that are enough, if nothing fits.
  Draft best() {
    if (!best_) {
      const auto smallest =
          std::ranges::min_element(too_large_, {}, [](const Draft& draft) { return draft.arrangement.slot_bytes(); });
      check_capacity(smallest->arrangement, options_.capacity);
    }
    return std::move(*best_);
  }

 private:
  void take(Draft draft) {
    if (!best_ || comparison_.is_better(draft, *best_)) best_ = std::move(draft);
  }

  const Layout& layout_;
  const PlanOptions& options_;
  const Comparison comparison_;
  PlanOptions unbalanced_;
  std::optional<Draft> best_;
  std::vector<Draft> too_large_;
};

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
  const std::vector<HeadParallel> fewest_bytes = choose_head_parallel(layout, options, Saves::kBytes);
  if (!fewest_bytes.empty()) {
    drafts.push_back(draft_of(layout, options, {fewest_bytes}));
    if (Comparison(layout, options).is_better(drafts[1], drafts[0])) std::swap(drafts[0], drafts[1]);
  }
  const int64_t wanted = drafts[0].arrangement.slot_bytes();
  const auto neediest = static_cast<int64_t>(drafts[0].arrangement.neediest_rank());
  if (!fits(drafts[0], options)) {
    const std::vector<HeadParallel> least_memory = choose_head_parallel(layout, options, Saves::kMemory);
    if (least_memory != fewest_bytes) drafts.push_back(draft_of(layout, options, {least_memory}));
    BestFit fit(layout, options);
    for (const Draft& draft : drafts) fit.consider(draft);
    // A server that gathers shards of a document holds more of its rows at once.
    for (size_t i = 0; i < drafts.size() && !fit.is_balanced(); ++i)
      fit.consider(draft_of(layout, options, {drafts[i].approach.head_parallel, /*gathers=*/false}));
    drafts[0] = fit.best();
  }
  drafts[0].wanted_slot_bytes = wanted;
  drafts[0].neediest_rank = neediest;
  return std::move(drafts[0]);
}

}  // namespace distca::plan
