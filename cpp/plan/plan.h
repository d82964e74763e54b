// The plan of one layout: every task and its server, every transfer, every arena offset, and the statistics. A rank
// needs only its slice, which is made on request.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "plan/arrangement.h"
#include "plan/rank_tables.h"
#include "plan/scheduler.h"
#include "plan/task_list.h"
#include "plan/transfers.h"

namespace distca::plan {

struct PlanOptions {
  ScheduleOptions schedule;
  ArrangementOptions arrangement;
  int64_t capacity = INT64_MAX;  // the most bytes of one slot's arena on any rank
  bool overlap = false;          // gradients come home in as few rounds as the capacity allows
};

/// The reason why the largest load is above the tolerance.
enum class Binding : int64_t {
  kNone = 0,      // the largest load is within the tolerance
  kGrain = 1,     // no single row of a head can move with gain
  kCapacity = 2,  // the arena of PlanStats::binding_rank is too small
  kBalanceOff = 3,
  kGivenTasks = 4,
};

struct PlanStats {
  std::vector<int64_t> load_before;  // by rank, with every row computed at home; cost-model units x query heads
  std::vector<int64_t> load;
  int64_t load_lower_bound = 0;
  Binding binding = Binding::kNone;
  int64_t binding_rank = -1;
  int64_t wanted_slot_bytes = 0;  // the largest arena of the plan that would be made without a capacity
  int64_t plan_ns = 0;
};

class DISTCA_EXPORT Plan {
 public:
  /// Makes a plan. It is a pure function of the arguments, the same to the last bit on every machine.
  Plan(std::shared_ptr<const Layout> layout, const PlanOptions& options);
  /// Makes a plan from a given schedule: tasks that compute every row and head of the layout once (task_list.h).
  Plan(std::shared_ptr<const Layout> layout, const PlanOptions& options, std::span<const GivenTask> tasks);

  const Layout& layout() const { return *layout_; }
  const PlanOptions& options() const { return options_; }
  const std::vector<Task>& tasks() const { return tasks_; }
  const PlanStats& stats() const { return stats_; }
  const Arrangement& arrangement() const { return arrangement_; }
  int64_t num_servers() const;
  /// Whether any rank may keep rows from forward to backward.
  bool retains() const;
  /// Lower bounds of bytes. They are found on request, because they take longer than all other statistics.
  ByteBounds byte_lower_bounds() const;
  uint64_t digest() const { return static_cast<uint64_t>(header_.plan_digest); }

  /// All rows that travel between ranks.
  std::vector<Transfer> transfers() const;
  /// The rank's slice, padded with zeros to a power of two of words.
  std::vector<int64_t> slice(int64_t rank) const;

 private:
  void complete(Arrangement arrangement);
  void fill_tables(int64_t rank, bool with_blocks, RankTables& tables) const;
  Header common_header() const;
  Header header_of(int64_t rank, const RankTables& tables) const;
  bool is_within_tolerance() const;

  std::shared_ptr<const Layout> layout_;
  PlanOptions options_;
  std::vector<Task> tasks_;
  Arrangement arrangement_;
  PlanStats stats_;
  Header header_ = {};
  std::vector<int64_t> rank_digests_;
};

}  // namespace distca::plan
