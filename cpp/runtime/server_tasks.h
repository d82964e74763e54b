// What a server computes in a step: the tasks of its slice as one attention problem, with the addresses of their rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "plan/tables.h"
#include "runtime/arena.h"
#include "runtime/protocol.h"

namespace distca::runtime {

/// The memory of such problems, which is used again and only grows.
class ServerTasks {
 public:
  /// The problem of the groups that wait for the rows of these rounds; those that need no row of another rank are of
  /// round -1. It views this object until the next call.
  attention::Problem problem(const plan::SliceView& slice, const Arena& arena, const ScoreOptions& scores,
                             Rounds rounds);

 private:
  attention::KeyGroup key_group(const plan::SliceView& slice, const Arena& arena, const plan::GroupRow& g);
  /// Adds to grads_ the runs that say where the key gradients of a group go, and returns them.
  std::span<const attention::KeyGradRun> add_gradient_runs(const plan::SliceView& slice, const Arena& arena,
                                                           const plan::GroupRow& g);

  std::vector<attention::Scores> scores_;
  std::vector<attention::KeyGroup> groups_;
  std::vector<attention::Task> tasks_;
  std::vector<attention::KeyGradRun> grads_;
};

}  // namespace distca::runtime
