#include "plan/limits.h"

#include <algorithm>
#include <numeric>

namespace distca::plan {

using Wide = __int128;

std::vector<int64_t> server_speeds(const Layout& layout, const ScheduleOptions& options) {
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

int64_t ranks_of_node(const Layout& layout, const ScheduleOptions& options) {
  return options.ranks_per_node > 0 ? options.ranks_per_node : layout.num_ranks();
}

HeadGroups head_groups(const ScheduleOptions& options) {
  const HeadShape& h = options.heads;
  if (options.split_heads) return {h.kv_heads, 1, h.q_heads / h.kv_heads};
  return {1, h.kv_heads, h.q_heads};
}

}  // namespace distca::plan
