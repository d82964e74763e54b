// Groups of a problem that add to the same key gradients. Both kernels let these store one after another, in the order
// of the problem.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "attention/attention.h"

namespace distca::attention {

/// The families of a problem's groups. Two groups are of one family if one adds to key gradients that the other has
/// written or added, or if a third one connects them. Memory is used again.
class Families {
 public:
  /// Finds them. Returns whether any group adds to key gradients at all.
  bool find(const Problem& problem) {
    const auto adds = [](const KeyGroup& g) { return std::ranges::any_of(g.grads, &KeyGradRun::is_added); };
    if (std::ranges::none_of(problem.groups, adds)) return false;
    runs_.clear();
    for (size_t g = 0; g < problem.groups.size(); ++g)
      for (const KeyGradRun& run : problem.groups[g].grads)
        runs_.push_back({run.dk.data, run.dk.data + (run.end - run.begin) * run.dk.row_stride, static_cast<int32_t>(g),
                         run.is_added});
    first_.resize(problem.groups.size());
    std::iota(first_.begin(), first_.end(), 0);
    std::ranges::sort(runs_, std::less(), &Run::begin);
    for (auto begin = runs_.begin(); begin != runs_.end();) {
      const std::byte* reach = begin->end;
      auto end = begin + 1;
      for (; end != runs_.end() && end->begin < reach; ++end) reach = std::max(reach, end->end);
      // Rows of a strided tensor seem to lie over those of its other heads. Nobody adds to them.
      if (std::any_of(begin, end, [](const Run& run) { return run.is_added; }))
        for (auto run = begin; run != end; ++run) join(begin->group, run->group);
      begin = end;
    }
    is_alone_.assign(first_.size(), true);
    for (size_t g = 0; g < first_.size(); ++g) {
      first_[g] = root(static_cast<int32_t>(g));
      if (first_[g] != static_cast<int32_t>(g)) is_alone_[g] = is_alone_[static_cast<size_t>(first_[g])] = false;
    }
    return true;
  }
  /// The first group of a group's family, by which the family is named.
  int32_t of(int64_t group) const { return first_[static_cast<size_t>(group)]; }
  /// Whether the group is the only one of its family.
  bool is_alone(int64_t group) const { return is_alone_[static_cast<size_t>(group)]; }

 private:
  struct Run {
    const std::byte *begin, *end;
    int32_t group;
    bool is_added;
  };

  int32_t root(int32_t group) const {
    while (first_[static_cast<size_t>(group)] != group) group = first_[static_cast<size_t>(group)];
    return group;
  }
  void join(int32_t a, int32_t b) {
    a = root(a);
    b = root(b);
    first_[static_cast<size_t>(std::max(a, b))] = std::min(a, b);
  }

  std::vector<Run> runs_;
  std::vector<int32_t> first_;
  std::vector<char> is_alone_;
};

}  // namespace distca::attention
