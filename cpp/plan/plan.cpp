#include "plan/plan.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "plan/limits.h"

namespace distca::plan {

Plan::Plan(std::shared_ptr<const Layout> layout, const PlanOptions& options,
           const std::optional<std::span<const GivenTask>>& given)
    : layout_(std::move(layout)), options_(options) {
  const auto start = std::chrono::steady_clock::now();
  options_.check(*layout_);
  draft_ = given ? make_draft(*layout_, options_, *given) : make_draft(*layout_, options_);
  slices_.emplace(*layout_, options_, given.value_or(std::span<const GivenTask>()), draft_);
  stats_.load_before = loads_at_home(*layout_, options_);
  for (int64_t& load : stats_.load_before) load *= head_groups(options_).query_heads_of_group;
  stats_.load = loads();
  stats_.load_lower_bound = load_lower_bound(*layout_, options_);
  stats_.wanted_slot_bytes = draft_.wanted_slot_bytes;
  stats_.binding = binding(given.has_value());
  if (stats_.binding == Binding::kCapacity) stats_.binding_rank = draft_.neediest_rank;
  const auto elapsed = std::chrono::steady_clock::now() - start;
  stats_.plan_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
}

/// The load of every rank, in cost-model units x query heads.
std::vector<int64_t> Plan::loads() const {
  std::vector<int64_t> loads(static_cast<size_t>(layout_->num_ranks()), 0);
  for (const Task& t : draft_.tasks) {
    const int64_t length = layout_->document_lengths()[static_cast<size_t>(t.document)];
    loads[static_cast<size_t>(t.server)] += options_.cost.cost(options_.mask, length, t.q_begin, t.q_end) *
                                            (t.kv_head_end - t.kv_head_begin) * options_.heads.group_heads();
  }
  return loads;
}

Binding Plan::binding(bool tasks_are_given) const {
  const int64_t unit = head_groups(options_).query_heads_of_group;
  const int64_t total = std::accumulate(stats_.load.begin(), stats_.load.end(), int64_t{0}) / unit;
  const std::vector<int64_t> limits = load_limits(total, server_speeds(*layout_, options_), options_.tolerance_ppm);
  const bool is_within_tolerance = std::equal(stats_.load.begin(), stats_.load.end(), limits.begin(),
                                              [&](int64_t load, int64_t limit) { return load <= limit * unit; });
  if (is_within_tolerance) return Binding::kNone;
  if (tasks_are_given) return Binding::kGivenTasks;
  if (!options_.balance) return Binding::kBalanceOff;
  return draft_.wanted_slot_bytes <= options_.capacity ? Binding::kGrain : Binding::kCapacity;
}

int64_t Plan::num_servers() const {
  return options_.servers.empty() ? layout_->num_ranks() : std::ssize(options_.servers);
}

ByteBounds Plan::byte_lower_bounds() const { return plan::byte_lower_bounds(*layout_, options_); }

std::vector<Transfer> Plan::transfers() const {
  return list_transfers(*layout_, options_.heads, draft_.tasks, draft_.arrangement);
}

std::vector<int64_t> Plan::slice(int64_t rank) const { return slices_->slice(rank); }

}  // namespace distca::plan
