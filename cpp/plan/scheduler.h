// The scheduler: cuts documents into tasks and gives every server the same load, while few bytes move.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/head_parallel.h"
#include "plan/layout.h"
#include "plan/options.h"
#include "plan/shard.h"
#include "plan/task_list.h"

namespace distca::plan {

/// How much each rank may compute that others have before loads are balanced, and how much of what it has itself others
/// may, in cost units x groups of heads (limits.h). Empty: any amount.
struct Allowances {
  std::vector<int64_t> in, out;
  // A rank may have to keep more than the limit of the others. Then this says whether they may have as much or stay at
  // the mean.
  bool level_with_largest = false;

  bool operator==(const Allowances&) const = default;
};

/// Ways to move fewer bytes, with which servers may need more memory, or less.
struct Approach {
  std::vector<HeadParallel> head_parallel;  // of each document; empty: no rows are exchanged for heads
  bool gathers = true;  // whether a document's shards go to servers that have shards of it where that saves keys
};

/// A part of a document that one server was given: rows [begin, end) and groups of heads (limits.h) [head_begin,
/// head_end). The rows lie in one segment, or in several that follow each other if ranks exchanged rows for heads.
struct Piece {
  int32_t placement = 0;  // index into Layout::placements() of a segment; no row lies before it
  int32_t server = 0;
  int32_t origin = 0;  // the server before loads were balanced
  int32_t head_begin = 0, head_end = 0;
  int64_t begin = 0, end = 0;
  int32_t next = -1;          // next piece of the same server
  int32_t moved_before = -1;  // of a piece that moved: the piece of the document that moved before it

  int64_t num_heads() const { return head_end - head_begin; }
  bool empty() const { return begin == end; }
};

/// Gives every server a load within the tolerance of its share of the mean, or as near to it as single rows allow. At
/// the start every rank has the rows that it holds, or its share of the heads of its group's rows where these are
/// exchanged. From there the scheduler moves few bytes between nodes first, then few bytes at all. It is a pure
/// function in integers: the same tasks on every machine. Allowances are kept; where they forbid the tolerance, the
/// largest load is about as small as they let it be. Ranks that do not serve give away all they have in any case. Loads
/// here are cost units x groups of heads.
class Scheduler {
 public:
  Scheduler(const Layout& layout, const PlanOptions& options, const Approach& approach = {},
            const Allowances& allowances = {});

  /// Makes the tasks, sorted by (server, document, kv_head_begin, q_begin). Neighbours on a server are merged, and head
  /// ranges of the tasks of one document are equal or disjoint.
  std::vector<Task> schedule();
  /// How much of others' rows each rank was given by balancing, and how much of its own others were.
  const Allowances& exchanged() const { return exchanged_; }

 private:
  struct Room {
    int64_t amount;
    int32_t rank;
    bool operator<(const Room& o) const { return amount != o.amount ? amount < o.amount : rank > o.rank; }
  };
  struct Source {
    int64_t value;
    int32_t piece;
    bool operator<(const Source& o) const { return value != o.value ? value < o.value : piece > o.piece; }
  };
  struct Move {
    Shard shard;  // of the first heads of a piece
    int32_t rank = -1;
    bool goes_on = false;  // whether the rest of the piece is a source again
  };

  /// Brings servers to their limit, which is the tolerance above their share of the mean.
  /// 1. What a node has above the limits of its ranks leaves the node.
  /// 2. What a rank has above its limit goes to others of its node.
  /// 3. What is left goes to any rank, at last in shards below min_rows rows.
  /// 4. Single rows move, as long as the largest load falls.
  /// Where tasks do not cost what their parts cost, cutting changes the mean. Then 3 and 4 are repeated for the new
  /// mean.
  void balance();
  std::vector<Task> tasks() const;
  /// The placements of a rank, in ascending order.
  std::span<const int32_t> placements_of(size_t rank) const {
    return std::span(by_rank_).subspan(first_of_rank_[rank], first_of_rank_[rank + 1] - first_of_rank_[rank]);
  }

  void index_placements();
  void exchange_rows_for_heads(std::span<const HeadParallel> head_parallel);
  void set_limits();
  void exchange_between_nodes();
  void drain(int32_t rank_begin, int32_t rank_end, int64_t min_rows);
  Move best_move(const Piece& piece, int64_t amount, int64_t min_rows);
  void consider(const Piece& piece, int64_t amount, int64_t min_rows, int32_t rank, Move& best);
  int64_t missing_rows(const Piece& piece, const Shard& shard, int32_t server) const;
  int64_t missing_keys(const Piece& piece, const Shard& shard, int32_t server) const;
  void apply(int32_t piece, const Move& move);
  void count_exchange(const Piece& piece, int32_t to, int64_t cost);
  int64_t allowance(const Piece& piece, int32_t to) const;
  int64_t relief(const Piece& piece, const Shard& shard) const;
  int64_t cost_at(int32_t server, int64_t document) const;
  bool all_within_limits() const;
  void set_room(int32_t rank, int64_t amount);
  void move_leftovers();
  void place_remains();
  void polish();
  bool heavier(int32_t a, int64_t extra_a, int32_t b, int64_t extra_b) const;
  int32_t lightest() const;
  Move last_resort(int32_t from, int32_t to, int32_t& piece) const;

  void materialise(int32_t rank);
  int32_t add_piece(Piece piece);
  void push_source(int32_t piece);

  /// Calls visit(segment, begin, end) for each segment that holds rows of the piece within document rows [begin, end).
  template <class Visit>
  void for_each_home(const Piece& p, int64_t begin, int64_t end, const Visit& visit) const {
    for (auto i = static_cast<size_t>(p.placement); begin < end; ++i) {
      const Placement& home = layout_.placements()[i];
      if (home.end <= begin) continue;
      visit(home, begin, std::min(home.end, end));
      begin = home.end;
    }
  }

  Document document_of(const Piece& p) const { return options_.document(layout_, placement_of(p).document); }
  const Placement& placement_of(const Piece& p) const { return layout_.placements()[static_cast<size_t>(p.placement)]; }
  int64_t node_of(int32_t rank) const { return rank / ranks_per_node_; }
  int64_t surplus(int32_t rank) const {
    const auto r = static_cast<size_t>(rank);
    return std::min(load_[r] - limit_[r], node_out_[static_cast<size_t>(node_of(rank))]);
  }
  int64_t leaving(const Piece& p) const {
    return p.origin == p.server ? left_.out[static_cast<size_t>(p.server)] : INT64_MAX;
  }
  int64_t room(int32_t rank) const {
    const auto r = static_cast<size_t>(rank);
    return std::min(std::min(limit_[r] - load_[r], left_.in[r]), node_in_[static_cast<size_t>(node_of(rank))]);
  }

  const Layout& layout_;
  const PlanOptions& options_;
  ShardFinder finder_;
  const bool is_additive_, gathers_;
  bool has_allowances_ = false;
  Allowances left_;  // kNoLimit: any amount
  Allowances exchanged_;
  int64_t num_heads_ = 1;  // number of groups of heads
  int64_t ranks_per_node_ = 1, num_nodes_ = 1;
  std::vector<int64_t> load_, limit_;
  std::vector<int64_t> speed_;  // 0: does not serve
  std::vector<int64_t> node_limit_;
  std::vector<int64_t> node_out_, node_in_;  // how much may still leave and enter a node in this step
  std::vector<int32_t> by_rank_;
  std::vector<size_t> first_of_rank_;
  std::vector<Piece> pieces_;
  std::vector<int32_t> first_piece_;            // of each server; -1: none
  std::vector<char> is_materialised_, is_cut_;  // by rank; by placement
  std::vector<int32_t> last_moved_;             // by cluster: the piece that moved last; -1: none did
  std::vector<Room> rooms_;                     // ascending
  std::vector<int64_t> room_of_;                // by rank: the amount of its entry in rooms_; 0: none
  std::vector<Source> sources_;                 // a heap
};

/// A lower bound of the largest load at mean speed, in cost units x query heads: the mean, or the costliest row.
int64_t load_lower_bound(const Layout& layout, const PlanOptions& options);

/// Lower bounds of bytes under the objective, for schedules that keep every load within the tolerance (proof:
/// bounds.cpp). Where ranks may retain keys, these need not travel again in backward. The bounds are 0 where nothing
/// is proven: where tasks do not cost what their parts cost, and where documents share rows.
struct ByteBounds {
  int64_t bytes = 0, between_nodes = 0;
};
ByteBounds byte_lower_bounds(const Layout& layout, const PlanOptions& options);

}  // namespace distca::plan
