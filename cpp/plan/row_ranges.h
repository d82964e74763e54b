// A set of rows as disjoint ranges, which says of rows that are added which of them are new.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

namespace distca::plan {

/// Disjoint ranges of rows.
class RowRanges {
 public:
  struct Range {
    int64_t begin, end;
    int64_t place = 0;  // where its first row lies, if anybody says so
  };

  /// Adds rows [begin, end). Calls visit(begin, end) for those that are new. Ranges that they touch become one.
  template <class Visit>
  void add(int64_t begin, int64_t end, const Visit& visit) {
    Range all{begin, end};
    auto next = ranges_.lower_bound(begin);
    for (int64_t row = begin; next != ranges_.end() && next->second.begin <= end; next = ranges_.erase(next)) {
      const Range& there = next->second;
      if (row < there.begin) visit(row, there.begin);
      row = std::max(row, there.end);
      all = {std::min(all.begin, there.begin), std::max(all.end, there.end)};
      begin = row;
    }
    if (begin < end) visit(begin, end);
    ranges_[all.end] = all;
  }
  /// The range that has a row.
  const Range& at(int64_t row) const { return ranges_.upper_bound(row)->second; }
  template <class Visit>
  void for_each(const Visit& visit) {
    for (auto& [end, range] : ranges_) visit(range);
  }

 private:
  std::map<int64_t, Range> ranges_;  // by their end
};

}  // namespace distca::plan
