#include "plan/cost.h"

#include <algorithm>

#include "common/digest.h"

namespace distca::plan {

int64_t CostModel::least_cost(int64_t pairs, int64_t rows) const {
  const auto& table = rates.rates;
  const int64_t rate = table.empty() ? RateTable::kRateUnit : *std::min_element(table.begin(), table.end());
  const __int128 scaled = static_cast<__int128>(per_pair) * pairs * rate;
  return static_cast<int64_t>(scaled / RateTable::kRateUnit) + per_row * rows;
}

uint64_t CostModel::digest() const {
  Digest d;
  d.add(per_pair);
  d.add(per_row);
  d.add(rates.num_keys_octaves);
  d.add(rates.rates);
  return d.value();
}

void CostModel::check() const {
  constexpr int64_t kMax = 1 << 20;
  require(per_pair >= 0 && per_row >= 0 && per_pair + per_row > 0 && per_pair <= kMax && per_row <= kMax,
          "cost model: per_pair = ", per_pair, ", per_row = ", per_row, "; integers from 0 to ", kMax,
          ", not both 0, are allowed");
  if (rates.rates.empty()) return;
  const auto size = static_cast<int64_t>(rates.rates.size());
  constexpr int64_t kMost = RateTable::kMaxOctaves;
  require(rates.num_keys_octaves >= 1 && rates.num_keys_octaves <= kMost && size % rates.num_keys_octaves == 0 &&
              size / rates.num_keys_octaves <= kMost,
          "cost model: a table of ", size, " rates, ", rates.num_keys_octaves, " a line; up to ", kMost,
          " lines of up to ", kMost, " are allowed");
  for (int64_t rate : rates.rates)
    require(rate >= 1 && rate <= kMax, "cost model: a rate is ", rate, "; 1 to ", kMax, " are allowed");
}

}  // namespace distca::plan
