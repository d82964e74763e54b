// What a plan is asked to be: the arguments of `distca.plan`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "plan/cost.h"
#include "plan/layout.h"
#include "plan/tables.h"

namespace distca::plan {

/// The messages that count as the bytes of a plan.
enum class Objective : int64_t { kAll = 0, kForward = 1 };

/// Most keys that a window may have: the rows of the longest document.
inline constexpr int64_t kMostWindow = int64_t{1} << 31;

struct PlanOptions {
  HeadShape heads;
  /// What makes scores: the different ones, and for each document which of them it has; empty: all have the first.
  std::vector<ScoresRow> scores = {ScoresRow()};
  std::vector<int64_t> scores_of_document;

  // Who computes what.
  CostModel cost;
  int64_t tolerance_ppm = 50'000;  // the largest load may exceed the mean by this many millionths
  int64_t min_rows = 128;          // pieces are no smaller, as long as the tolerance can be met so
  bool balance = true;             // false: every row is computed at home
  bool split_heads = true;         // whether key/value heads of a row may go to different servers
  std::vector<int64_t> servers;    // ranks that compute, ascending; empty: all
  std::vector<int64_t> speeds;     // one of every rank, by which loads are divided; empty: all the same
  int64_t ranks_per_node = 0;      // number of neighbours with fast links among them; 0: all ranks
  Objective objective = Objective::kAll;

  // Where rows lie in the arenas.
  int64_t key_block_rows = 64;
  int64_t capacity = INT64_MAX;          // the most bytes of one slot's arena on any rank
  bool overlap = false;                  // gradients come home in as few rounds as the capacity allows
  DType reduce_dtype = DType::kFloat32;  // in which contributions to key gradients travel: fp32, or that of the heads
  int64_t round_bytes = 1 << 20;         // rows go to a server in as many rounds as leave each so many bytes on average
  std::vector<int64_t> retain_bytes;  // bytes of keys and values that each rank may keep, as a server, from a forward
                                      // step until its backward step; empty: none

  /// What the plan is for, in printable ASCII: "tick 5 of 10, backward". It is in the digest and in messages. A plan
  /// with a label may be given another one with a label for its backward pass, in which other ranks hold other
  /// documents.
  std::string label;

  /// Throws InvalidArgumentError, which names the option, unless a plan of this layout can be made with them.
  void check(const Layout& layout) const;
  /// The number of a document's scores.
  int64_t scores_of(int64_t document) const {
    return scores_of_document.empty() ? 0 : scores_of_document[static_cast<size_t>(document)];
  }
  /// The document of that number, as costs see it.
  Document document(const Layout& layout, int64_t number) const {
    return {layout.document_lengths()[static_cast<size_t>(number)],
            {scores[static_cast<size_t>(scores_of(number))].mask(), layout.bidirectional(number)}};
  }
  /// Whether contributions to key gradients may be rounded to the dtype of the heads before they travel.
  bool reduces_narrow() const { return reduce_dtype != DType::kFloat32; }
  /// Whether any rank may keep rows from forward to backward.
  bool retains() const;
};

}  // namespace distca::plan
