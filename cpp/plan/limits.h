// How much every rank may compute, and what no schedule can do better than.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "plan/layout.h"
#include "plan/scheduler.h"

namespace distca::plan {

inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

/// Of every rank; 0 where it does not serve.
std::vector<int64_t> server_speeds(const Layout& layout, const ScheduleOptions& options);

/// The largest load of every rank: its share of `total` by speed with the tolerance on top, in whole units; never less
/// than its share rounded up, or there might be no room for all.
std::vector<int64_t> load_limits(int64_t total, const std::vector<int64_t>& speeds, int64_t tolerance_ppm);

/// Raises limits to what the allowances force: to `tolerance_ppm` above the lowest level, the same at equal speed, at
/// which ranks of these loads that keep to them compute all.
void raise_to_reachable(const std::vector<int64_t>& load, const std::vector<int64_t>& speeds,
                        const Allowances& allowances, int64_t tolerance_ppm, std::vector<int64_t>& limits);

/// Consecutive ranks that count as a node.
int64_t ranks_of_node(const Layout& layout, const ScheduleOptions& options);

/// Key/value heads that go to one server together, and the number of such groups.
struct HeadGroups {
  int64_t num_groups = 1, heads_of_group = 1, query_heads_of_group = 1;
};
HeadGroups head_groups(const ScheduleOptions& options);

/// Of every rank with every row computed at home, in cost units x groups of heads.
std::vector<int64_t> loads_at_home(const Layout& layout, const ScheduleOptions& options);

}  // namespace distca::plan
