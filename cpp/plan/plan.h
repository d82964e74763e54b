// The plan: for one layout every task and its server, every transfer, every arena offset, and the statistics. What one
// rank needs of it is its slice, made on request.
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
  int64_t capacity = INT64_MAX;  // bytes of one slot's arena, which no plan passes
  bool overlap = false;          // gradients come home in one round where the capacity allows
};

/// What keeps the largest load from the tolerance.
enum class Binding : int64_t {
  kNone = 0,      // it is within the tolerance
  kGrain = 1,     // single rows of a head: none can move with gain
  kCapacity = 2,  // the arena of PlanStats::binding_rank
  kBalanceOff = 3,
  kGivenTasks = 4,
};

struct PlanStats {
  std::vector<int64_t> load_before;  // by rank, with every row computed at home; cost-model units x query heads
  std::vector<int64_t> load;
  int64_t load_lower_bound = 0;
  Binding binding = Binding::kNone;
  int64_t binding_rank = -1;
  int64_t wanted_slot_bytes = 0;  // the largest arena of the plan that would be made with any capacity
  int64_t plan_ns = 0;
};

class DISTCA_EXPORT Plan {
 public:
  /// A pure function of its arguments, the same to the last bit on every machine.
  Plan(std::shared_ptr<const Layout> layout, const PlanOptions& options);
  /// The same with a schedule of somebody else's: tasks that compute every row and head of the layout once
  /// (task_list.h).
  Plan(std::shared_ptr<const Layout> layout, const PlanOptions& options, std::span<const GivenTask> tasks);

  const Layout& layout() const { return *layout_; }
  const PlanOptions& options() const { return options_; }
  const std::vector<Task>& tasks() const { return tasks_; }
  const PlanStats& stats() const { return stats_; }
  const Arrangement& arrangement() const { return arrangement_; }
  int64_t num_servers() const;
  /// Whether any rank may keep rows from forward to backward.
  bool retains() const;
  /// Found on request, for they take longer than all other statistics.
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
