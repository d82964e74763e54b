// The state of a schedule in the making, and the steps that balance it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/layout.h"
#include "plan/scheduler.h"
#include "plan/shard.h"

namespace distca::plan {

/// Rows [begin, end) and groups of heads (limits.h) [head_begin, head_end) of one segment, at one server.
struct Piece {
  int32_t placement = 0;  // index into Layout::placements()
  int32_t server = 0;
  int32_t head_begin = 0, head_end = 0;
  int64_t begin = 0, end = 0;
  int32_t next = -1;  // of the same server

  int64_t num_heads() const { return head_end - head_begin; }
  bool empty() const { return begin == end; }
};

/// Loads here are cost units x groups of heads.
class Balancer {
 public:
  Balancer(const Layout& layout, const ScheduleOptions& options, const Allowances& allowances);

  /// Servers aim at their limit: the tolerance above their share of the mean. 1. What a node has above the limits of
  /// its ranks leaves it. 2. What a rank has above its limit goes to others of its node. 3. What is left for lack of
  /// shards that are long enough goes anywhere. 4. Single rows, as long as the largest load falls. Where tasks do not
  /// cost what their parts do, cutting changes the mean, and 3 and 4 are done again for the new one.
  void run();

  /// Of a placement that is not cut all is at home; of one that is, all is in pieces, some of which are empty.
  bool is_cut(size_t placement) const { return is_cut_[placement]; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  /// Placements of a rank, ascending.
  std::span<const int32_t> placements_of(size_t rank) const {
    return std::span(by_rank_).subspan(first_of_rank_[rank], first_of_rank_[rank + 1] - first_of_rank_[rank]);
  }

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
    bool goes_on = false;  // what is left of the piece is a source again
  };

  void index_placements();
  void set_limits();
  void exchange_between_nodes();
  void drain(int32_t rank_begin, int32_t rank_end, int64_t min_rows);
  Move best_move(const Piece& piece, int64_t amount, int64_t min_rows);
  void consider(const Piece& piece, int64_t amount, int64_t min_rows, int32_t rank, Move& best);
  int64_t missing_keys(const Piece& piece, const Shard& shard, int32_t server) const;
  void apply(int32_t piece, const Move& move);
  void use_allowances(const Piece& piece, int32_t to, int64_t cost);
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

  int64_t length_of(const Piece& p) const {
    return layout_.document_lengths()[static_cast<size_t>(placement_of(p).document)];
  }
  const Placement& placement_of(const Piece& p) const { return layout_.placements()[static_cast<size_t>(p.placement)]; }
  int64_t node_of(int32_t rank) const { return rank / ranks_per_node_; }
  int64_t surplus(int32_t rank) const {
    const auto r = static_cast<size_t>(rank);
    return std::min(load_[r] - limit_[r], node_out_[static_cast<size_t>(node_of(rank))]);
  }
  int64_t leaving(const Piece& p) const {
    return placement_of(p).rank == p.server ? left_.out[static_cast<size_t>(p.server)] : INT64_MAX;
  }
  int64_t room(int32_t rank) const {
    const auto r = static_cast<size_t>(rank);
    return std::min(std::min(limit_[r] - load_[r], left_.in[r]), node_in_[static_cast<size_t>(node_of(rank))]);
  }

  const Layout& layout_;
  const ScheduleOptions& options_;
  ShardFinder finder_;
  const bool is_additive_;
  bool has_allowances_ = false;
  Allowances left_;        // kNoLimit: any amount
  int64_t num_heads_ = 1;  // groups of them
  int64_t ranks_per_node_ = 1, num_nodes_ = 1;
  std::vector<int64_t> load_, limit_;
  std::vector<int64_t> speed_;  // 0: no server
  std::vector<int64_t> node_limit_;
  std::vector<int64_t> node_out_, node_in_;  // what may still leave and enter a node in this step
  std::vector<int32_t> by_rank_;
  std::vector<size_t> first_of_rank_;
  std::vector<Piece> pieces_;
  std::vector<int32_t> first_piece_;                    // of each server, -1: none
  std::vector<char> is_materialised_, is_cut_, moved_;  // by rank; by placement; by document
  std::vector<Room> rooms_;                             // ascending
  std::vector<int64_t> room_of_;                        // by rank: its entry's amount, 0: none
  std::vector<Source> sources_;                         // a heap
};

}  // namespace distca::plan
