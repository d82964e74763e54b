// Groups of a problem that add to the same key gradients do so in the order of the problem. This finds who comes before
// whom.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

#include "attention/attention.h"

namespace distca::attention {

/// Whether any group adds to key gradients. Where none does, there is no order.
inline bool has_adds(const Problem& problem) {
  return std::ranges::any_of(problem.groups,
                             [](const KeyGroup& g) { return std::ranges::any_of(g.grads, &KeyGradRun::is_added); });
}

/// Who has stored last to each row of key gradients.
class StoreOrder {
 public:
  /// Stores rows [first, last) of a run. If they are added, calls visit(number) for all that have stored to some of
  /// them just before; for one of them more than once, perhaps. Who only writes comes after nobody: rows of a strided
  /// tensor seem to lie over those of its other heads.
  template <class Visit>
  void store(const KeyGradRun& run, int64_t first, int64_t last, int64_t number, const Visit& visit) {
    const std::byte* const begin = run.dk.from_row(first - run.begin).data;
    const std::byte* const end = run.dk.from_row(last - run.begin).data;
    auto next = stores_.lower_bound(begin);
    if (next != stores_.begin() && std::prev(next)->second.end > begin) --next;
    while (next != stores_.end() && next->first < end) {
      const std::byte* const there = next->first;
      const Store before = next->second;
      if (run.is_added) visit(before.number);
      next = stores_.erase(next);
      if (there < begin) stores_[there] = {begin, before.number};
      if (end < before.end) stores_[end] = before;
    }
    stores_[begin] = {end, number};
  }

 private:
  struct Store {
    const std::byte* end;
    int64_t number;
  };
  std::map<const std::byte*, Store> stores_;  // by their first byte
};

}  // namespace distca::attention
