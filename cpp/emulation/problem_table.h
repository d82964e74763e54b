// A Problem as parts of a table, for attention that runs when its caller's arrays are gone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "transport/table.h"

namespace distca::emulation {

/// The parts of a problem. They are valid until the next problem, or until this one's arrays change. Memory is used
/// again.
class ProblemParts {
 public:
  std::span<const transport::TablePart> of(const attention::Problem& problem) {
    using transport::table_part;
    blocks_.clear();
    grads_.clear();
    bidirectional_.clear();
    // The arrays of all groups lie one after another.
    for (const attention::KeyGroup& g : problem.groups) {
      blocks_.insert(blocks_.end(), g.blocks.begin(), g.blocks.end());
      grads_.insert(grads_.end(), g.grads.begin(), g.grads.end());
      bidirectional_.insert(bidirectional_.end(), g.bidirectional.begin(), g.bidirectional.end());
    }
    parts_ = {transport::table_value("problem", problem),
              table_part("groups of tasks", problem.groups),
              table_part("tasks", problem.tasks),
              table_part("key blocks", blocks_),
              table_part("runs of key gradients", grads_),
              table_part("scores", problem.scores),
              table_part("ranges of bidirectional rows", bidirectional_)};
    return parts_;
  }

 private:
  std::array<transport::TablePart, 7> parts_;
  std::vector<int64_t> blocks_;
  std::vector<attention::KeyGradRun> grads_;
  std::vector<BidirectionalRows> bidirectional_;
};

/// The problem of a table with these parts. It keeps using the table's memory.
class KeptProblem {
 public:
  KeptProblem(const transport::TableLayout& layout, const std::byte* memory) {
    const auto part = [&]<class T>(size_t i, const T*) {
      return std::span(reinterpret_cast<const T*>(memory + layout.offset(i)),
                       reinterpret_cast<const uint64_t*>(memory)[i]);
    };
    problem = part(0, &problem)[0];
    const auto all = part(1, static_cast<const attention::KeyGroup*>(nullptr));
    groups_.assign(all.begin(), all.end());
    problem.tasks = part(2, static_cast<const attention::Task*>(nullptr));
    auto blocks = part(3, static_cast<const int64_t*>(nullptr));
    auto grads = part(4, static_cast<const attention::KeyGradRun*>(nullptr));
    problem.scores = part(5, static_cast<const attention::Scores*>(nullptr));
    auto bidirectional = part(6, static_cast<const BidirectionalRows*>(nullptr));
    for (attention::KeyGroup& g : groups_) {
      g.blocks = blocks.first(g.blocks.size());
      g.grads = grads.first(g.grads.size());
      blocks = blocks.subspan(g.blocks.size());
      grads = grads.subspan(g.grads.size());
      g.bidirectional = bidirectional.first(g.bidirectional.size());
      bidirectional = bidirectional.subspan(g.bidirectional.size());
    }
    problem.groups = groups_;
  }
  KeptProblem(const KeptProblem&) = delete;
  KeptProblem& operator=(const KeptProblem&) = delete;

  attention::Problem problem;

 private:
  std::vector<attention::KeyGroup> groups_;
};

}  // namespace distca::emulation
