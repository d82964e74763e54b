// How much every rank may compute.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "plan/head_parallel.h"
#include "plan/layout.h"
#include "plan/scheduler.h"

namespace distca::plan {

inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

/// The speed of every rank; 0 for a rank that does not serve.
std::vector<int64_t> server_speeds(const Layout& layout, const PlanOptions& options);

/// The largest allowed load of every rank, in whole units: its share of `total` by speed, with the tolerance on top. A
/// limit is never below the share rounded up, because otherwise there might be no room for all.
std::vector<int64_t> load_limits(int64_t total, const std::vector<int64_t>& speeds, int64_t tolerance_ppm);

/// Raises limits where allowances make the tolerance unreachable. It finds the lowest level of load over speed at which
/// ranks with these loads and allowances can compute everything together. A limit becomes at least its rank's share at
/// that level, with the tolerance on top.
void raise_to_reachable(const std::vector<int64_t>& load, const std::vector<int64_t>& speeds,
                        const Allowances& allowances, int64_t tolerance_ppm, std::vector<int64_t>& limits);

/// The number of consecutive ranks that count as a node.
int64_t ranks_of_node(const Layout& layout, const PlanOptions& options);

/// How key/value heads are grouped: the heads of a group always go to one server together.
struct HeadGroups {
  int64_t num_groups = 1, heads_of_group = 1, query_heads_of_group = 1;
};
HeadGroups head_groups(const PlanOptions& options);

/// The load of every rank with every row computed at home, in cost units x groups of heads. Documents whose ranks
/// exchange rows for heads do not count.
std::vector<int64_t> loads_at_home(const Layout& layout, const PlanOptions& options,
                                   std::span<const HeadParallel> head_parallel = {});

}  // namespace distca::plan
