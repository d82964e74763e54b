#include "plan/shard.h"

#include <algorithm>
#include <cmath>

namespace distca::plan {
namespace {

using Wide = __int128;
constexpr int kFractionBits = 20;

/// The square root, rounded down. The floating-point root is only a first guess.
int64_t square_root(Wide x) {
  auto root = static_cast<int64_t>(std::sqrt(static_cast<double>(x)));
  while (Wide{root} * root > x) --root;
  while (Wide{root + 1} * (root + 1) <= x) ++root;
  return root;
}

}  // namespace

bool Shard::better_than(const Shard& other) const {
  if (empty() || other.empty()) return !empty();
  const Wide x = Wide{cost} * other.bytes, y = Wide{other.cost} * bytes;
  return x != y ? x > y : cost > other.cost;
}

Prices prices(const PlanOptions& options) {
  const HeadShape& h = options.heads;
  const int64_t e = h.element_bytes(), group = h.q_heads / h.kv_heads;
  const int64_t key = e * (h.dim + h.v_dim);
  Prices p = {group * (e * (h.dim + h.v_dim) + 4), key, key};
  if (options.objective == Objective::kAll) {
    p.query_row += group * (e * (2 * h.dim + h.v_dim) + 8);
    p.key_row += (e + dtype_bytes(options.reduce_dtype)) * (h.dim + h.v_dim);
    p.sole_key_row += 2 * key;
  }
  if (options.split_heads) return p;
  return {h.kv_heads * p.query_row, h.kv_heads * p.key_row, h.kv_heads * p.sole_key_row};
}

ShardFinder::ShardFinder(const PlanOptions& options) : cost_(options.cost), prices_(plan::prices(options)) {
  // This is sqrt(r^2 + 2 r) - r with r = key_row / query_row (see best_tail).
  const int64_t k = prices_.key_row, q = prices_.query_row;
  tail_fraction_ =
      (square_root((Wide{k} * k + Wide{2} * k * q) << (2 * kFractionBits)) - (Wide{k} << kFractionBits)) / q;
}

int64_t ShardFinder::tail_begin(const Document& d, int64_t begin, int64_t end, int64_t budget) const {
  int64_t low = begin, high = end;  // the answer lies in [low, high]
  if (d.mask.mask == Mask{} && cost_.per_pair > 0) {
    // per_pair (end^2 - a^2) / 2 + (per_row + per_pair / 2) (end - a) = budget
    const double s = static_cast<double>(cost_.per_row) / static_cast<double>(cost_.per_pair) + 0.5;
    const double e = static_cast<double>(end) + s;
    const double square = e * e - 2 * static_cast<double>(budget) / static_cast<double>(cost_.per_pair);
    const auto guess = std::clamp(square > 0 ? static_cast<int64_t>(std::sqrt(square) - s) : begin, begin, end);
    for (int64_t step = 1; low < high; step *= 4) {  // finds a bracket around the guess
      const int64_t up = std::min(high, guess + step), down = std::max(low, guess - step);
      if (cost(d, up, end) > budget) {
        low = up + 1;
        continue;
      }
      high = up;
      if (down == low || cost(d, down, end) > budget) {
        low = down == low ? low : down + 1;
        break;
      }
      high = down;
    }
  }
  while (low < high) {
    const int64_t mid = low + (high - low) / 2;
    if (cost(d, mid, end) <= budget)
      high = mid;
    else
      low = mid + 1;
  }
  return low;
}

int64_t ShardFinder::best_tail(const Document& d, int64_t begin, int64_t end) const {
  if (!grows(d.mask.mask, end - 1)) return begin;
  // Rows [a, b) see b keys. Let f = (b - a) / b, and let r be the price of a key row over that of a query row. Then
  // cost over bytes is (f - f^2 / 2) / (f + r), which is largest where f^2 + 2 r f = 2 r.
  return std::max(begin, end - std::max<int64_t>(1, end * tail_fraction_ >> kFractionBits));
}

int64_t ShardFinder::value(const Document& d, int64_t begin, int64_t end) const {
  const int64_t a = best_tail(d, begin, end);
  return static_cast<int64_t>((Wide{cost(d, a, end)} << 20) / bytes(end - a, d.num_keys(a, end)));
}

Shard ShardFinder::of_heads(const Document& d, int64_t begin, int64_t end, int64_t num_heads, int64_t budget,
                            int64_t min_rows) const {
  const int64_t of_one = budget / num_heads;
  int64_t a = begin, b = end;
  if (cost(d, begin, end) > of_one) {
    if (end - begin < 2 * min_rows) return {};
    if (grows(d.mask.mask, end - 1) && cost_.per_pair > 0) {
      // Of all rows [a, b) of a given cost, those with b = (1 + r) a are the cheapest. Where that b lies below `end`,
      // neither the last rows nor the first ones are the cheapest.
      const int64_t k = prices_.key_row, q = prices_.query_row;
      const int64_t inner =
          square_root(Wide{of_one / cost_.per_pair} * 2 * (k + q) * (k + q) / (Wide{k} * (k + 2 * q)));
      if (inner <= end - min_rows && inner >= begin + 2 * min_rows) b = inner;
    }
    a = tail_begin(d, begin, b, of_one);
    if (a > begin) a = std::max(a, begin + min_rows);
    if (b - a < min_rows) {
      a = last_affordable(d, begin, end, of_one, min_rows);
      if (a < 0) return {};
      b = a + min_rows;
    }
  }
  return {a, b, num_heads, num_heads * cost(d, a, b), num_heads * bytes(b - a, d.num_keys(a, b))};
}

int64_t ShardFinder::last_affordable(const Document& d, int64_t begin, int64_t end, int64_t budget,
                                     int64_t num_rows) const {
  const auto affordable = [&](int64_t row) { return cost(d, row, row + num_rows) <= budget; };
  if (!affordable(begin)) return -1;
  int64_t low = begin, high = end - num_rows;
  while (low < high) {
    const int64_t mid = low + (high - low + 1) / 2;
    if (affordable(mid))
      low = mid;
    else
      high = mid - 1;
  }
  // What remains on either side must be long enough, or nothing.
  if (low > end - 2 * num_rows && low < end - num_rows) low = end - 2 * num_rows;
  // Rows that see those after them may cost more than later ones.
  return low < begin + num_rows || !affordable(low) ? begin : low;
}

Shard ShardFinder::best(const Document& d, int64_t begin, int64_t end, int64_t num_heads, int64_t budget,
                        int64_t min_rows) const {
  const int64_t ideal = cost(d, best_tail(d, begin, end), end);
  const int64_t fewer = std::clamp<int64_t>(budget / ideal, 1, num_heads);
  Shard found;
  // If the budget takes all heads down to the best row, a lower row would bring less for a byte.
  if (fewer == num_heads) found = of_heads(d, begin, end, fewer, std::min(budget, fewer * ideal), min_rows);
  if (found.empty()) found = of_heads(d, begin, end, fewer, budget, min_rows);
  if (fewer < num_heads) {
    const Shard more = of_heads(d, begin, end, fewer + 1, budget, min_rows);
    if (more.better_than(found)) found = more;
  }
  return found;
}

}  // namespace distca::plan
