// The arrangement of a plan, for all ranks at once: which keys every server needs, which rows travel, and where they
// lie in the arenas of both ends. It costs little more than the tasks themselves. The tables of a rank (slice_tables.h)
// are filled from it on request.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "common/align.h"
#include "plan/layout.h"
#include "plan/options.h"
#include "plan/tables.h"
#include "plan/task_list.h"

namespace distca::plan {

/// Indices 0 .. n-1 grouped by a key. The indices of a key are consecutive and ascending.
class Buckets {
 public:
  template <class KeyOf>
  void fill(size_t num_keys, size_t n, const KeyOf& key_of) {
    first_.assign(num_keys + 1, 0);
    items_.resize(n);
    for (size_t i = 0; i < n; ++i) ++first_[static_cast<size_t>(key_of(i)) + 1];
    for (size_t key = 0; key < num_keys; ++key) first_[key + 1] += first_[key];
    std::vector<uint32_t> next(first_.begin(), first_.end() - 1);
    for (size_t i = 0; i < n; ++i) items_[next[static_cast<size_t>(key_of(i))]++] = static_cast<uint32_t>(i);
  }
  std::span<const uint32_t> operator[](int64_t key) const {
    const auto k = static_cast<size_t>(key);
    return std::span(items_).subspan(first_[k], first_[k + 1] - first_[k]);
  }

 private:
  std::vector<uint32_t> first_, items_;
};

/// Whether the task is a whole document in one segment, computed at home, that shares no row with another. Nothing of
/// such a document travels, and it needs no arrangement.
inline bool is_whole_at_home(const Layout& layout, const HeadShape& heads, const Task& t) {
  return t.server == t.home && t.kv_head_end - t.kv_head_begin == heads.kv_heads && t.q_begin == 0 &&
         t.q_end == layout.document_lengths()[static_cast<size_t>(t.document)] &&
         layout.placements(t.document).size() == 1 && !layout.shares_rows(t.document);
}

/// Key blocks [begin, end) of a group, counted from the start of the document, that lie in its server's arena one after
/// another: the first row of the first block in row `row` of the group's pool. It may be a row before the pool, if the
/// group's keys begin inside that block.
struct ArenaBlocks {
  int64_t begin = 0, end = 0;
  int64_t row = 0;
};

/// Keys [begin, end) of a group that come to rows of its pool from `row` on. What came for an earlier group does not
/// come again.
struct Arrival {
  int64_t begin = 0, end = 0;
  int64_t row = 0;
};

/// The keys in the arena of a server that groups with the same heads share, whose documents share rows. Rows that
/// follow one another in a document do so in its runs of rows; a block reads them wherever it begins. Blocks whose rows
/// do not lie in a run are put together behind them.
struct KeyPool {
  int64_t num_rows = 0;
  std::array<int64_t, 2> k = {-1, -1}, v = {-1, -1};  // offsets in the server's arena, by phase
};

/// The tasks of one document and head range at one server that together see one unbroken range of keys.
struct Group {
  int64_t server = 0, document = 0;
  int64_t kv_head_begin = 0, kv_head_end = 0;
  int64_t kv_begin = 0, kv_end = 0;
  size_t task_begin = 0, task_end = 0;          // range of the plan's tasks
  size_t gradient_begin = 0, gradient_end = 0;  // range of the arrangement's key gradients
  size_t arena_begin = 0, arena_end = 0;        // range of the arrangement's arena blocks
  size_t arrival_begin = 0, arrival_end = 0;    // range of the arrangement's arrivals
  int64_t pool = -1;                            // of its keys in the arena; -1 if it has none
  int64_t retained_k = -1, retained_v = -1;  // offsets in the server's retained memory; where set, k[1] and v[1] are -1
  int64_t round = -1;                        // of the rows that it waits for; -1: it needs none of other ranks

  bool is_local() const { return round < 0; }
  bool is_retained() const { return retained_k >= 0; }

  int64_t num_kv_heads() const { return kv_head_end - kv_head_begin; }
};

/// A task whose rows live on another rank than its server. All places are arena offsets.
struct RemoteTask {
  size_t task = 0, group = 0;
  int64_t forward_q = -1, forward_lse = -1;  // in the server's arena
  int64_t backward_q = -1, backward_dout = -1, backward_lse = -1, backward_delta = -1;
  int64_t home_out = -1, home_lse = -1, home_dq = -1;  // in the home's arena
  int64_t round = 0;                                   // the round in which dq comes home
};

/// Gradients of keys [begin, end) that a group computes. All of these rows live on one rank. Where documents share
/// them, several groups of a server may: the first one writes its contribution, and the others add theirs to it.
struct KeyGradient {
  size_t group = 0;
  int64_t begin = 0, end = 0;  // rows of the group's document
  int64_t document = 0;        // whose own rows they are: [begin - shift, end - shift)
  int64_t shift = 0;
  int64_t home = 0, home_row = 0;
  GradTarget target = GradTarget::kReturned;
  int64_t dk = -1, dv = -1;            // offsets in the server's arena; -1 for kReturned
  int64_t home_dk = -1, home_dv = -1;  // offsets in the home's arena of what is copied or added there
  int64_t round = 0;
  int64_t sum = -1;        // index of the sum that it is added to; -1 if this group alone contributes
  bool is_first = false;   // whether it is the first term of that sum
  int64_t place = -1;      // number of the contribution of which it is a term
  int64_t last_round = 0;  // of the groups that add to it: the last one's

  /// Whether it is added to what an earlier group of its server has written. Then that one travels, and this does not.
  bool is_added() const { return target == GradTarget::kAdded; }

  /// How it lies at its server, and travels.
  TensorKind dk_kind() const { return target == GradTarget::kArena ? TensorKind::kDk : TensorKind::kDkPartial; }
  TensorKind dv_kind() const { return target == GradTarget::kArena ? TensorKind::kDv : TensorKind::kDvPartial; }
};

/// A sum of key gradients of the same rows, to which several groups contribute.
struct KeyGradientSum {
  int64_t home = 0;
  bool is_own = false;  // whether its home alone contributes
  int64_t row = 0, num_rows = 0;
  int64_t kv_head_begin = 0, kv_head_end = 0;
  int64_t dk = -1, dv = -1;  // in the home's arena
};

/// The parts of one rank's arena in one phase, in bytes: rows from other homes, scratch of key gradients, rows that
/// come home.
struct ArenaBytes {
  int64_t server_in = 0, home_in = 0, scratch = 0;
  int64_t total() const { return server_in + home_in + scratch; }
};

struct Arrangement {
  std::vector<Group> groups;              // sorted by server and round; a server's local groups come first
  std::vector<ArenaBlocks> arena_blocks;  // by group
  std::vector<Arrival> arrivals;          // by group
  std::vector<KeyPool> pools;
  std::vector<RemoteTask> remote;      // by group
  std::vector<KeyGradient> gradients;  // by group
  std::vector<KeyGradientSum> sums;
  std::vector<int64_t> num_rounds;  // number of rounds of each home's gradients

  Buckets groups_of_server, groups_of_document;
  Buckets remote_of_server, remote_of_home;
  Buckets gradients_of_home;  // the gradients that come from another rank
  Buckets own_sums_of_home;   // the sums to which the home alone contributes

  std::array<std::vector<ArenaBytes>, 2> arenas;  // by phase and rank
  /// Bytes that cross between ranks, by message: forward in, forward out, backward in, backward out.
  std::array<int64_t, 4> bytes = {};
  std::array<int64_t, 4> bytes_between_nodes = {};  // the part of `bytes` that crosses between nodes

  std::vector<int64_t> retained_bytes;  // bytes that each server retains
  int64_t saved_bytes = 0;              // bytes that retaining takes away from backward-in

  std::span<const ArenaBlocks> arena_blocks_of(const Group& g) const {
    return std::span(arena_blocks).subspan(g.arena_begin, g.arena_end - g.arena_begin);
  }
  std::span<const Arrival> arrivals_of(const Group& g) const {
    return std::span(arrivals).subspan(g.arrival_begin, g.arrival_end - g.arrival_begin);
  }
  /// What the group's blocks in the arena are a part of.
  KeyPool pool_of(const Group& g) const { return g.pool < 0 ? KeyPool{} : pools[static_cast<size_t>(g.pool)]; }

  /// A rank's larger arena of the two phases.
  int64_t arena_bytes(size_t rank) const { return std::max(arenas[0][rank].total(), arenas[1][rank].total()); }
  /// The rank with the largest arena.
  size_t neediest_rank() const;
  /// The bytes of the largest arena.
  int64_t slot_bytes() const { return arena_bytes(neediest_rank()); }
};

/// Arranges tasks that are sorted by (server, document, kv_head_begin, q_begin), with equal or disjoint head ranges
/// within each document.
Arrangement arrange(const Layout& layout, const PlanOptions& options, std::span<const Task> tasks);

/// Makes the key pools of a server's groups that need rows of others, and says where the blocks of these lie, and which
/// of their rows come for them (key_pools.cpp).
void place_keys(const Layout& layout, const PlanOptions& options, Arrangement& arrangement, std::span<Group> groups);

/// Fills in the key gradients of an arrangement that has its groups, and their sums (key_gradients.cpp). Returns the
/// number of contributions to sums (KeyGradient::place).
int64_t split_key_gradients(const Layout& layout, const PlanOptions& options, Arrangement& arrangement);

// Rounds: the order in which gradients come home, and the memory that they take there (rounds.cpp).

/// Gives every gradient that comes to `home` its round and its place. Servers come in ascending order. A round has as
/// many messages as fit into the size of the largest single message, or into what the home's arena has left of
/// `slot_bytes`, where that is more.
void place_gradients(Arrangement& arrangement, const HeadShape& heads, std::span<const Task> tasks, int64_t home,
                     int64_t slot_bytes);

/// Places gradients anew in as few rounds as arenas of `slot_bytes` allow. Few rounds are better, because those after
/// the first travel one after another, when the home is ready for them, and overlap with nothing.
void merge_rounds(Arrangement& arrangement, const HeadShape& heads, std::span<const Task> tasks, int64_t slot_bytes);

/// The key blocks of a group that its server reads where they are, because their keys lie in one of its own segments.
/// The range [begin, end) counts blocks from the start of the document.
struct BlockRange {
  int64_t begin = 0, end = 0;
};
inline BlockRange local_blocks(const Group& g, const Placement& p, int64_t key_block_rows) {
  if (p.rank != g.server || p.end <= g.kv_begin || p.begin >= g.kv_end) return {};
  const int64_t begin = p.begin <= g.kv_begin ? g.kv_begin / key_block_rows : ceil_div(p.begin, key_block_rows);
  const int64_t end = p.end >= g.kv_end ? ceil_div(g.kv_end, key_block_rows) : p.end / key_block_rows;
  return begin < end ? BlockRange{begin, end} : BlockRange{};
}

/// Calls visit(rows) for the rows of each segment on another rank that come to a group's server for it.
template <class Visit>
void for_each_source(const Layout& layout, std::span<const Arrival> arrivals, const Group& g, const Visit& visit) {
  const auto placements = layout.key_placements(g.document);
  auto first = placements.begin();
  for (const Arrival& arrival : arrivals) {
    while (first->end <= arrival.begin) ++first;
    for (auto p = first; p != placements.end() && p->begin < arrival.end; ++p)
      if (p->rank != g.server) visit(p->within(arrival.begin, arrival.end));
  }
}

}  // namespace distca::plan
