// The slices of a plan: for each rank a header and its tables (tables.h) as int64 words.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/draft.h"
#include "plan/slice_tables.h"

namespace distca::plan {

/// Writes the slices of one draft. Only their digests are made at once, because a rank needs no slice but its own. What
/// it is made of must outlive it.
class Slices {
 public:
  /// `given` are the tasks that a caller gave in place of the scheduler's, if any.
  Slices(const Layout& layout, const PlanOptions& options, std::span<const GivenTask> given, const Draft& draft);

  /// The digest of the plan.
  uint64_t digest() const { return static_cast<uint64_t>(common_.plan_digest); }
  /// The rank's slice, padded with zeros to a power of two of words.
  std::vector<int64_t> slice(int64_t rank) const;

 private:
  void fill(int64_t rank, bool with_blocks, SliceTables& tables) const;
  Header header_of(int64_t rank, const SliceTables& tables) const;

  const Layout& layout_;
  const PlanOptions& options_;
  const Draft& draft_;
  Header common_;
  std::vector<int64_t> rank_digests_;
};

}  // namespace distca::plan
