#include "plan/limits.h"

#include <algorithm>
#include <numeric>

namespace distca::plan {

using Wide = __int128;

std::vector<int64_t> server_speeds(const Layout& layout, const PlanOptions& options) {
  const auto n = static_cast<size_t>(layout.num_ranks());
  const std::vector<int64_t> speeds = options.speeds.empty() ? std::vector<int64_t>(n, 1) : options.speeds;
  if (options.servers.empty()) return speeds;
  std::vector<int64_t> of_servers(n, 0);
  for (int64_t s : options.servers) of_servers[static_cast<size_t>(s)] = speeds[static_cast<size_t>(s)];
  return of_servers;
}

std::vector<int64_t> load_limits(int64_t total, const std::vector<int64_t>& speeds, int64_t tolerance_ppm) {
  const Wide sum = std::accumulate(speeds.begin(), speeds.end(), int64_t{0});
  std::vector<int64_t> limits;
  limits.reserve(speeds.size());
  for (int64_t speed : speeds) {
    const Wide share = Wide{total} * speed;
    const Wide within = share * (1'000'000 + tolerance_ppm) / (sum * 1'000'000);
    limits.push_back(static_cast<int64_t>(std::max((share + sum - 1) / sum, within)));
  }
  return limits;
}

void raise_to_reachable(const std::vector<int64_t>& load, const std::vector<int64_t>& speeds,
                        const Allowances& allowances, int64_t tolerance_ppm, std::vector<int64_t>& limits) {
  constexpr int kFractionBits = 20;  // of loads over speeds
  const int64_t total = std::accumulate(load.begin(), load.end(), int64_t{0});
  const auto is_reachable = [&](Wide level) {
    Wide placed = 0;
    for (size_t r = 0; r < load.size(); ++r) {
      if (speeds[r] == 0) continue;
      const Wide share = level * speeds[r] >> kFractionBits;
      const Wide least = Wide{load[r]} - std::max<int64_t>(0, allowances.out[r]);
      if (allowances.level_with_largest && share < least) return false;
      placed += std::clamp(share, least, Wide{load[r]} + std::max<int64_t>(0, allowances.in[r]));
    }
    return placed >= total;
  };
  Wide low = 0, high = Wide{total} << kFractionBits;
  while (low < high) {
    const Wide mid = low + (high - low) / 2;
    if (is_reachable(mid))
      high = mid;
    else
      low = mid + 1;
  }
  for (size_t r = 0; r < limits.size(); ++r) {
    const Wide share = (low * speeds[r] >> kFractionBits) * (1'000'000 + tolerance_ppm) / 1'000'000;
    limits[r] = std::max(limits[r], static_cast<int64_t>(std::min(share, Wide{total})));
  }
}

int64_t ranks_of_node(const Layout& layout, const PlanOptions& options) {
  return options.ranks_per_node > 0 ? options.ranks_per_node : layout.num_ranks();
}

HeadGroups head_groups(const PlanOptions& options) {
  const HeadShape& h = options.heads;
  if (options.split_heads) return {h.kv_heads, 1, h.q_heads / h.kv_heads};
  return {1, h.kv_heads, h.q_heads};
}

std::vector<int64_t> loads_at_home(const Layout& layout, const PlanOptions& options,
                                   std::span<const HeadParallel> head_parallel) {
  std::vector<int64_t> load(static_cast<size_t>(layout.num_ranks()), 0);
  const auto placements = layout.placements();
  const int64_t num_groups = head_groups(options).num_groups;
  for (size_t i = 0; i < placements.size();) {
    const Placement& p = placements[i];
    int64_t end = p.end;
    // Segments that follow each other on one rank are one task.
    for (++i; i < placements.size(); ++i) {
      const Placement& next = placements[i];
      if (next.document != p.document || next.rank != p.rank || next.row != p.row + (end - p.begin)) break;
      end = next.end;
    }
    if (!head_parallel.empty() && head_parallel[static_cast<size_t>(p.document)].group_size > 1) continue;
    load[static_cast<size_t>(p.rank)] +=
        num_groups * options.cost.cost(options.document(layout, p.document), p.begin, end);
  }
  return load;
}

}  // namespace distca::plan
