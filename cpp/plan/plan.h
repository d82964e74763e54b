// The plan: for one layout every task and its server, every transfer, every arena offset, and the statistics.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "plan/scheduler.h"
#include "plan/tables.h"

namespace distca::plan {

struct PlanOptions {
  ScheduleOptions schedule;
  int64_t key_block_rows = 64;
  int64_t capacity = INT64_MAX;  // bytes of one slot's arena; a plan that needs more is never made
  int64_t context_epoch = 0;     // 0: usable by any context
};

/// All bytes are counted as they cross between ranks; copies within a rank are free.
struct PlanStats {
  std::vector<int64_t> load_before;  // by rank, with every row computed at home; cost-model units x query heads
  std::vector<int64_t> load;
  int64_t lower_bound = 0;  // of the largest load
  /// By message: forward in, forward out, backward in, backward out.
  std::array<int64_t, 4> bytes = {};
  /// By phase and rank: rows from other homes at a server, rows that come home, fp32 scratch of key gradients.
  struct Arena {
    int64_t server_in = 0, home_in = 0, scratch = 0;
    int64_t total() const { return server_in + home_in + scratch; }
  };
  std::array<std::vector<Arena>, 2> arenas;
  int64_t plan_ns = 0;
};

/// Everything one rank does in a step; becomes its slice.
struct RankTables {
  std::vector<GroupRow> groups;
  std::vector<TaskRow> tasks;
  std::vector<int64_t> blocks;
  std::vector<GradRow> grads;
  std::vector<SumRow> sums;
  std::vector<PaddingRow> padding;
  std::array<std::vector<SendRow>, 2> sends;
  std::array<std::vector<ReceiveRow>, 2> receives;
  std::array<std::vector<WaitRow>, 2> waits;
  int64_t num_rounds = 1;
};

class DISTCA_EXPORT Plan {
 public:
  /// A pure function of its arguments, the same to the last bit on every machine.
  Plan(std::shared_ptr<const Layout> layout, const PlanOptions& options);

  const Layout& layout() const { return *layout_; }
  const PlanOptions& options() const { return options_; }
  const std::vector<Task>& tasks() const { return tasks_; }
  const PlanStats& stats() const { return stats_; }
  int64_t num_servers() const;
  const RankTables& tables(int64_t rank) const { return tables_[static_cast<size_t>(rank)]; }
  uint64_t digest() const { return digest_; }

  /// The rank's slice, padded with zeros to a power of two of words.
  std::vector<int64_t> slice(int64_t rank) const;

 private:
  std::shared_ptr<const Layout> layout_;
  PlanOptions options_;
  std::vector<Task> tasks_;
  std::vector<RankTables> tables_;
  PlanStats stats_;
  uint64_t digest_ = 0;
  int64_t slot_bytes_ = 0;
};

/// Fills the tables of every rank, and bytes and arenas of the statistics (assemble.cpp).
void assemble(const Layout& layout, const PlanOptions& options, const std::vector<Task>& tasks,
              std::vector<RankTables>& tables, PlanStats& stats);

}  // namespace distca::plan
