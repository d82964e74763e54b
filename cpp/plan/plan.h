// The plan of one layout: every task and its server, every transfer, every arena offset, and the statistics. A rank
// needs only its slice, which is made on request.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "plan/draft.h"
#include "plan/scheduler.h"
#include "plan/slice_tables.h"

namespace distca::plan {

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

/// Rows [begin, end) of a document, of one tensor, for a range of key/value heads and the query heads that share them.
struct Transfer {
  Phase phase = Phase::kForward;
  Direction direction = Direction::kIn;
  int64_t source = 0, target = 0;  // ranks
  int64_t document = 0, begin = 0, end = 0;
  int64_t kv_head_begin = 0, kv_head_end = 0;
  TensorKind tensor = TensorKind::kQ;
  int64_t bytes = 0;
  int64_t round = 0;  // in which it goes to its server; of results: after which they go home
};

class DISTCA_EXPORT Plan {
 public:
  /// Makes a plan. It is a pure function of the arguments, the same to the last bit on every machine. Given tasks take
  /// the place of the scheduler's; they compute every row and head of the layout once (task_list.h).
  Plan(std::shared_ptr<const Layout> layout, const PlanOptions& options,
       const std::optional<std::span<const GivenTask>>& given = std::nullopt);

  const Layout& layout() const { return *layout_; }
  const std::vector<Task>& tasks() const { return draft_.tasks; }
  /// For each task the round of rows from other ranks after which it is computed; -1 if it needs none.
  std::vector<int64_t> rounds_of_tasks() const;
  const PlanStats& stats() const { return stats_; }
  const Arrangement& arrangement() const { return draft_.arrangement; }
  /// For each document how its ranks exchange rows for heads; empty: none do.
  const std::vector<HeadParallel>& head_parallel() const { return draft_.approach.head_parallel; }
  int64_t num_servers() const;
  /// Lower bounds of bytes. They are found on request, because they take longer than all other statistics.
  ByteBounds byte_lower_bounds() const;
  uint64_t digest() const { return static_cast<uint64_t>(header_.plan_digest); }

  /// All rows that travel between ranks. The four messages of a step are made of them.
  std::vector<Transfer> transfers() const;
  /// The rank's slice: its header and tables (tables.h) as words, padded with zeros to a power of two.
  std::vector<int64_t> slice(int64_t rank) const;

 private:
  std::vector<int64_t> loads() const;
  Binding binding(bool tasks_are_given) const;
  void make_header(std::span<const GivenTask> given);
  Header header_of(int64_t rank, const SliceTables& tables) const;

  std::shared_ptr<const Layout> layout_;
  PlanOptions options_;
  Draft draft_;
  Header header_ = {};  // the words that all slices share
  std::vector<int64_t> rank_digests_;
  PlanStats stats_;
};

}  // namespace distca::plan
