// Head parallelism: ranks that hold a document together exchange its rows for heads.
//
// A rank that computes its rows of a long document needs the keys of nearly all others, so that with n ranks the keys
// travel n times. If p of these ranks compute their rows together, each for one p-th of the heads, queries travel once
// more and keys n / p times. (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, has p = n; Fang and Zhao, arXiv
// 2405.07719, have both.)
#pragma once

#include <cstdint>
#include <vector>

#include "plan/layout.h"
#include "plan/options.h"

namespace distca::plan {

/// How the ranks of a document exchange its rows for heads.
struct HeadParallel {
  int32_t group_size = 1;     // at most so many ranks do so together; 1: every rank computes the rows that it holds
  bool within_nodes = false;  // whether the ranks of a group are of one node

  bool operator==(const HeadParallel&) const = default;
};

/// Ranks that hold rows of a document. Each computes the rows of all of them, for its share of the heads.
struct HeadParallelGroup {
  struct Member {
    int32_t rank = 0;
    int32_t head_begin = 0, head_end = 0;  // groups of heads (limits.h)
  };
  /// Consecutive rows of the document that members hold.
  struct Run {
    int32_t placement = 0;  // of its first row: index into Layout::placements()
    int64_t begin = 0, end = 0;
  };
  std::vector<Member> members;
  std::vector<Run> runs;  // ascending
};

/// Divides the ranks of a document into groups of about the same size, which is not above the number of groups of
/// heads. Ranks of a group follow each other in the order of their first rows. Where tasks do not cost what their parts
/// cost, every segment is a run, because a task has one home.
std::vector<HeadParallelGroup> head_parallel_groups(const Layout& layout, const PlanOptions& options, int64_t document,
                                                    HeadParallel how);

/// What a document's groups are chosen for.
enum class Saves {
  kBytes,  // the fewest bytes travel before loads are balanced, weighed as by weighted_bytes (shard.h)
  kMemory  // the fewest keys have a place in arenas: the largest groups
};

/// Chooses for each document. Empty: all ranks compute the rows that they hold.
std::vector<HeadParallel> choose_head_parallel(const Layout& layout, const PlanOptions& options, Saves saves);

}  // namespace distca::plan
