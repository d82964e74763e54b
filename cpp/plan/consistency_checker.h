// The state of check_consistency: what it knows of a slice, and its checks, by the file that has them.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "plan/layout.h"
#include "plan/tables.h"
#include "plan/validate.h"

namespace distca::plan::consistency {

/// Rows of this rank's tensors, for a range of key/value heads.
struct Part {
  int64_t row, num_rows;
  int64_t kv_head_begin, kv_head_end;
  auto operator<=>(const Part&) const = default;
};
template <class Row>
Part part_of(const Row& r) {
  return {r.row, r.num_rows, r.kv_head_begin, r.kv_head_end};
}

/// Rows that go to a peer or come from it.
struct Message {
  int64_t peer;
  Part part;
  int64_t round = 0;  // of rows that are sent to a server
  auto operator<=>(const Message&) const = default;
};

/// Rows in an arena that are sent home, or that were copied there from this rank's own tensor.
struct Move {
  int64_t phase, tensor, offset;
  Part part;  // of results: row 0
  int64_t peer;
  int64_t after = 0;  // of results: the round of the rows that they are computed from
  auto operator<=>(const Move&) const = default;
};

/// Bytes of an arena. Extents of different rounds from 1 on may overlap each other. None of them may overlap one of
/// round 0.
struct Extent {
  int64_t round, begin, end;
  auto operator<=>(const Extent&) const = default;
};

/// Rows of a document that lie on this rank.
struct Held {
  int64_t document, begin, end, row;
  auto operator<=>(const Held&) const = default;
};

inline constexpr int64_t kBase = 0;  // round of what is no message that comes home

/// The checks of check_consistency, and what they have found so far.
class Checker {
 public:
  explicit Checker(const SliceView& slice) : slice_(slice), h_(slice.header()) {}

  void run();

 private:
  // ---- this rank's rows ----

  void find_rows();

  /// This rank's segments of a document that are its own, ascending.
  std::span<const Held> held(int64_t document) const;

  /// Calls visit(begin, end, row) for those own rows [begin, end) of a document that this rank has, from `row` on,
  /// among rows [from, to).
  template <class Visit>
  void for_each_held(int64_t document, int64_t from, int64_t to, const Visit& visit) const {
    const std::span<const Held> own = held(document);
    auto h = std::ranges::upper_bound(own, from, {}, &Held::end);
    for (; h != own.end() && h->begin < to; ++h) {
      const int64_t begin = std::max(h->begin, from);
      visit(begin, std::min(h->end, to), h->row + (begin - h->begin));
    }
  }

  /// This rank's segments of all rows that a document has, those of others included, ascending.
  std::vector<Held> held_keys(int64_t document) const;

  /// The entry of by_row_ that holds all of rows [row, row + num_rows), or null if none does.
  const Held* segment_of(int64_t row, int64_t num_rows) const {
    const auto after =
        std::upper_bound(by_row_.begin(), by_row_.end(), row, [](int64_t r, const Held& x) { return r < x.row; });
    if (after == by_row_.begin()) return nullptr;
    const Held& s = *std::prev(after);
    return row + num_rows <= s.row + (s.end - s.begin) ? &s : nullptr;
  }
  /// Whether rows [begin, begin + num_rows) of the document lie on this rank from `row` on. They are all own rows of
  /// one document, which follow one another there.
  bool holds(int64_t row, int64_t num_rows, int64_t document, int64_t begin) const {
    const auto [owner, own_row] = owner_of(document, begin, begin + num_rows);
    return is_at(row, num_rows, owner, own_row);
  }
  /// Whether own rows [begin, begin + num_rows) of a document lie on this rank from `row` on.
  bool is_at(int64_t row, int64_t num_rows, int64_t document, int64_t begin) const {
    const Held* const s = segment_of(row, num_rows);
    return s != nullptr && s->document == document && s->begin + (row - s->row) == begin;
  }

  /// Whose own rows [begin, end) of a document are, and its row that the first of them is. (-1, -1) if they are of
  /// several.
  std::pair<int64_t, int64_t> owner_of(int64_t document, int64_t begin, int64_t end) const {
    std::pair<int64_t, int64_t> found(-1, -1);
    slice_.for_each_owner(document, begin, end, [&](int64_t owner, int64_t row, int64_t num_rows) {
      if (num_rows == end - begin) found = {owner, row};
    });
    return found;
  }

  int64_t stride(Phase p, Direction d, TensorKind kind, const Part& part) const {
    return row_format(slice_.heads().with_kv_heads(part.kv_head_end - part.kv_head_begin), p, d, kind).row_stride();
  }
  static Part heads_of(const GroupRow& g, int64_t num_rows = 0) {
    return {0, num_rows, g.kv_head_begin, g.kv_head_end};
  }

  // ---- consistency.cpp: what this rank computes ----

  /// Checks that tasks, blocks and gradients of the groups follow one another.
  void check_groups() const;

  /// Checks that a block whose visible keys lie in one segment of this rank is read there, and that all others are read
  /// in the arena, where a row of their pool is the same one for all of its groups. Rows that this rank has are copied
  /// there once.
  void check_blocks();

  /// Whether two groups whose keys begin at one offset may share what lies there.
  static bool is_same_pool(const GroupRow& x, const GroupRow& y);

  void expect_copy(const GroupRow& g, int64_t row, int64_t num_rows, int64_t arena_row);

  /// Merges moves of rows that are next to each other. Cuts at the borders of blocks therefore do not count.
  void merge(std::vector<Move>& moves) const;

  /// Checks that this rank copies exactly those of its own rows into blocks that are needed there.
  void check_copies(Phase p);

  void check_tasks() const;

  void check_gradients() const;

  // ---- what is sent home ----

  /// Checks that every result of rows of another rank is sent home once, and that nothing but results is sent home.
  void check_results(Phase p);

  /// Adds the key gradients to the results. Any rank may be the home of a key gradient; it is the peer to which the
  /// gradient is sent. Gradients that are sent nowhere must be terms of sums of this rank's own rows.
  void add_gradients(std::vector<Move>& results, const std::vector<Move>& sent);

  // ---- consistency_messages.cpp: what comes home ----

  /// Checks that exactly those queries leave whose results come home, with all that belongs to them, and from the same
  /// peer. Keys leave with their values.
  void check_messages();

  std::vector<Message> received(Phase p, TensorKind kind) const;
  std::vector<Message> sent(Phase p, TensorKind kind) const;
  static std::vector<Message> without_rounds(std::vector<Message> messages);

  /// Checks that partial key gradients of the same rows are added into one place, and that the first of them starts it.
  void check_sums();

  // ---- exactly once ----

  /// Checks that every row and head of a returned tensor comes from one place.
  void check_returned(TensorKind kind);

  /// Checks that the parts tile the returned tensor. For all heads between two neighbouring borders of parts, a row is
  /// in the same parts.
  void check_tiles(TensorKind kind);

  // ---- waits ----

  void check_waits(Phase p) const;

  // ---- consistency_memory.cpp ----

  void check_arena(Phase p);

  /// Checks that no two things are sent to one place of a peer's arena, and that all that goes home to a peer goes in
  /// one round.
  void check_targets(Phase p);

  void check_retained();

  /// Checks that no two extents overlap, that what comes home lies behind everything else, and that the memory asked
  /// for is the memory used.
  void check_disjoint(const char* memory, int64_t size);

  /// Own rows of a document that lie in a pool. The first one is `shift` less than its row of the pool.
  struct PoolRows {
    int64_t end;
    int64_t document, shift;
  };
  /// The keys in the arena of groups that share them.
  struct Pool {
    const GroupRow* first = nullptr;
    std::map<int64_t, PoolRows> rows;  // by the first row of the pool
  };

  /// Adds own rows of a document to a pool. Calls visit(begin, end) for rows of the pool that are new.
  template <class Visit>
  static void add_rows(Pool& pool, int64_t begin, const PoolRows& rows, const Visit& visit) {
    auto next = pool.rows.upper_bound(begin);
    if (next != pool.rows.begin() && std::prev(next)->second.end > begin) --next;
    for (int64_t row = begin; row < rows.end;) {
      const bool is_there = next != pool.rows.end() && next->first <= row;
      const int64_t end = std::min(rows.end, is_there                  ? next->second.end
                                             : next != pool.rows.end() ? next->first
                                                                       : rows.end);
      if (is_there) {
        check_plan(next->second.document == rows.document && next->second.shift == rows.shift, "row ", row,
                   " of keys in the arena is two rows");
        ++next;
      } else {
        visit(row, end);
        pool.rows[row] = {end, rows.document, rows.shift};
      }
      row = end;
    }
  }

  /// Gradients that go into a sum of this home: own rows of a document from `begin` on.
  struct OwnTerm {
    Move move;
    int64_t document, begin;

    /// Whether gradients of rows of a document, from `first` on, may be added to these: they are of the same rows where
    /// both lie. Rows are `stride` bytes apart.
    bool adds(const Move& term, int64_t of_document, int64_t first, int64_t stride) const {
      const int64_t before = first - begin;
      return term.tensor == move.tensor && of_document == document && before >= 0 &&
             before + term.part.num_rows <= move.part.num_rows && term.offset - move.offset == before * stride &&
             term.part.kv_head_begin == move.part.kv_head_begin && term.part.kv_head_end == move.part.kv_head_end;
    }
  };

  /// Takes the own term at this offset away. Returns whether there is one; checks that it is of the rows of `sum`.
  bool take_own_term(TensorKind kind, int64_t offset, const ReceiveRow& sum);

  const SliceView& slice_;
  const Header& h_;
  std::vector<Held> held_;                                    // by document
  std::vector<Held> by_row_;                                  // by row; segments that continue one another are one
  std::vector<Move> copies_;                                  // copies that this rank has to make
  std::map<std::pair<int64_t, int64_t>, OwnTerm> own_terms_;  // of this rank, into its own sums: by tensor and offset
  std::vector<Move> sums_;
  // The rounds in which tasks need keys of other ranks, in forward and in backward.
  std::array<std::array<bool, kMaxRoundsIn>, 2> needs_others_ = {};
  std::vector<Part> parts_;
  std::vector<int64_t> heads_;
  std::vector<Extent> extents_;
};

}  // namespace distca::plan::consistency
