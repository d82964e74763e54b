// Key pools: where the keys and values lie that come to a server for its groups, and for which group each row comes.
#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/arrangement.h"
#include "plan/row_ranges.h"

namespace distca::plan {
namespace {

/// Makes the pools of one server, and says what lies where in them.
class KeyPools {
 public:
  KeyPools(const Layout& layout, const PlanOptions& options, Arrangement& arrangement)
      : layout_(layout), block_rows_(options.key_block_rows), a_(arrangement) {}

  /// Makes the pools of a server's groups, with the runs of rows that these need.
  void make_pools(std::span<Group> groups) {
    for (Group& g : groups) {
      for_each_part(g, [&](int64_t begin, int64_t end, const SharedRows* rows) {
        if (g.pool < 0) g.pool = layout_.shares_rows(g.document) ? shared_pool(g) : new_pool();
        if (rows == nullptr) return;
        const auto [first, last] = visible_rows(g, begin, end);
        runs_[{g.pool, rows->of}].add(first - rows->shift(), last - rows->shift(), [](int64_t, int64_t) {});
      });
    }
    for (auto& [owner, runs] : runs_) {
      int64_t& num_rows = a_.pools[static_cast<size_t>(owner.first)].num_rows;
      runs.for_each([&](RowRanges::Range& run) {
        run.place = num_rows;
        num_rows += run.end - run.begin;
      });
    }
  }

  /// Says where the group's key blocks lie that are not read in local segments, and which of their rows come for it.
  void place_blocks(Group& g) {
    g.arena_begin = a_.arena_blocks.size();
    g.arrival_begin = a_.arrivals.size();
    for_each_part(g, [&](int64_t begin, int64_t end, const SharedRows* rows) {
      const auto [first, last] = visible_rows(g, begin, end);
      if (rows == nullptr) {
        add_blocks(g, begin, end, put_together(g, begin) - (first - begin * block_rows_));
        return;
      }
      const int64_t own_first = first - rows->shift();
      const RowRanges::Range& run = runs_[{g.pool, rows->of}].at(own_first);
      const int64_t later = run.place - run.begin;  // how much later in the pool a row of its document is
      add_blocks(g, begin, end, later + own_first - (first - begin * block_rows_));
      arrived_[{g.pool, rows->of}].add(own_first, last - rows->shift(), [&](int64_t row, int64_t end_row) {
        add_arrival(g, {row + rows->shift(), end_row + rows->shift(), later + row});
      });
    });
    g.arena_end = a_.arena_blocks.size();
    g.arrival_end = a_.arrivals.size();
  }

 private:
  /// A pool, and a document whose own rows lie in it.
  using Owner = std::pair<int64_t, int64_t>;

  /// Calls visit(begin, end, rows) for key blocks [begin, end) of a group that are not read in local segments. Their
  /// visible rows are all of `rows`; or there is one block, of whose rows some are not, and `rows` is null.
  template <class Visit>
  void for_each_part(const Group& g, const Visit& visit) const {
    const auto of_others = layout_.shared(g.document);
    const int64_t first = layout_.first_row(g.document);
    const SharedRows own = {g.document, first, g.document, first, g.kv_end};
    auto rows = of_others.begin();
    const auto cut = [&](int64_t block, int64_t end) {
      while (block < end) {
        const int64_t row = std::max(block * block_rows_, g.kv_begin);
        while (rows != of_others.end() && rows->at + rows->num_rows() <= row) ++rows;
        const SharedRows& here = rows == of_others.end() ? own : *rows;
        const int64_t end_row = here.at + here.num_rows();
        const int64_t inside = end_row >= g.kv_end ? end : std::min(end, end_row / block_rows_);
        const int64_t next = std::max(inside, block + 1);
        visit(block, next, inside > block ? &here : nullptr);
        block = next;
      }
    };
    int64_t next = g.kv_begin / block_rows_;
    for (const Placement& p : layout_.key_placements(g.document)) {
      const BlockRange local = local_blocks(g, p, block_rows_);
      if (local.begin == local.end) continue;
      cut(next, local.begin);
      next = local.end;
    }
    cut(next, ceil_div(g.kv_end, block_rows_));
  }

  /// The rows of key blocks [begin, end) that a group has.
  std::pair<int64_t, int64_t> visible_rows(const Group& g, int64_t begin, int64_t end) const {
    return {std::max(begin * block_rows_, g.kv_begin), std::min(end * block_rows_, g.kv_end)};
  }
  void add_blocks(const Group& g, int64_t begin, int64_t end, int64_t row) {
    ArenaBlocks* const last = a_.arena_blocks.size() > g.arena_begin ? &a_.arena_blocks.back() : nullptr;
    if (last != nullptr && last->end == begin && last->row + (begin - last->begin) * block_rows_ == row)
      last->end = end;
    else
      a_.arena_blocks.push_back({begin, end, row});
  }
  void add_arrival(const Group& g, const Arrival& arrival) {
    Arrival* const last = a_.arrivals.size() > g.arrival_begin ? &a_.arrivals.back() : nullptr;
    if (last != nullptr && last->end == arrival.begin && last->row + (last->end - last->begin) == arrival.row)
      last->end = arrival.end;
    else
      a_.arrivals.push_back(arrival);
  }

  /// Puts a block together of rows that lie in no run. Returns the row of the pool where its visible rows begin. Others
  /// may have the same block, if it has all of its rows.
  int64_t put_together(const Group& g, int64_t block) {
    int64_t& num_rows = a_.pools[static_cast<size_t>(g.pool)].num_rows;
    const auto [first, last] = visible_rows(g, block, block + 1);
    int64_t row = num_rows;
    if (last - first == block_rows_) {
      rows_of_block_.assign({g.pool});
      const auto of_document = layout_.key_placements(g.document);
      auto p = std::ranges::upper_bound(of_document, first, {}, &Placement::end);
      for (; p != of_document.end() && p->begin < last; ++p) {
        const int64_t from = std::max(p->begin, first);
        rows_of_block_.insert(rows_of_block_.end(), {p->document, from - p->shift, from - first});
      }
      row = placed_.try_emplace(rows_of_block_, num_rows).first->second;
    }
    if (row == num_rows) {
      num_rows += last - first;
      add_arrival(g, {first, last, row});
    }
    return row;
  }
  int64_t shared_pool(const Group& g) {
    const auto [pool, is_first] = pools_.try_emplace({layout_.cluster(g.document), g.kv_head_begin}, -1);
    if (is_first) pool->second = new_pool();
    return pool->second;
  }
  int64_t new_pool() {
    a_.pools.emplace_back();
    return std::ssize(a_.pools) - 1;
  }

  const Layout& layout_;
  const int64_t block_rows_;
  Arrangement& a_;
  // The pools by cluster and first head; by pool and document the runs of rows, with their first rows in the pool, and
  // the rows that have come for groups before; and where whole blocks that are put together begin, by pool and by what
  // rows they have.
  std::map<std::pair<int64_t, int64_t>, int64_t> pools_;
  std::map<Owner, RowRanges> runs_, arrived_;
  struct Hash {
    size_t operator()(const std::vector<int64_t>& words) const {
      uint64_t hash = 0;
      for (int64_t word : words) hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15 >> 1;
      return hash;
    }
  };
  std::unordered_map<std::vector<int64_t>, int64_t, Hash> placed_;
  std::vector<int64_t> rows_of_block_;
};

}  // namespace

void place_keys(const Layout& layout, const PlanOptions& options, Arrangement& arrangement, std::span<Group> groups) {
  KeyPools pools(layout, options, arrangement);
  pools.make_pools(groups);
  for (Group& g : groups) pools.place_blocks(g);
}

}  // namespace distca::plan
