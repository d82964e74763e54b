// The place where the largest scores of a forward step are gathered, if somebody asks for them. Every slot has it,
// behind all that a plan arranges.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/rows.h"

namespace distca::runtime {

/// A server raises the largest scores that it finds in each home's rows, and puts them into that home's slot. For
/// either there is a row for each rank, with one fp32 for each query head.
class MaxLogits {
 public:
  /// The most query heads that there is room for.
  static constexpr int64_t kMostHeads = 256;
  /// The bytes that it takes of a slot.
  static constexpr int64_t bytes(int64_t num_ranks) { return 2 * num_ranks * kRowBytes; }

  /// Nobody asks.
  MaxLogits() = default;
  /// It begins `offset` bytes after `arena`.
  MaxLogits(std::byte* arena, int64_t offset, int64_t num_ranks, int64_t q_heads)
      : arena_(arena), begin_(offset), num_ranks_(num_ranks), q_heads_(q_heads) {}

  bool is_asked() const { return arena_ != nullptr; }
  int64_t q_heads() const { return q_heads_; }
  /// What this server has found in the rows of each home.
  RowView found() const { return {arena_ + begin_, kRowBytes, kBytes}; }
  RowExtent extent_of_found() const { return {num_ranks_, q_heads_, kBytes}; }
  float* found_for(int64_t home) const { return reinterpret_cast<float*>(found().at(home, 0)); }
  /// Where in a home's slot a server puts what it has found for that home.
  int64_t target_of(int64_t server) const { return begin_ + (num_ranks_ + server) * kRowBytes; }
  const float* told_by(int64_t server) const { return reinterpret_cast<const float*>(arena_ + target_of(server)); }
  /// A row of one rank.
  RowView row(float* values) const { return {reinterpret_cast<std::byte*>(values), kRowBytes, kBytes}; }
  RowExtent extent_of_row() const { return {1, q_heads_, kBytes}; }

 private:
  static constexpr int64_t kBytes = sizeof(float);
  static constexpr int64_t kRowBytes = kMostHeads * kBytes;

  std::byte* arena_ = nullptr;
  int64_t begin_ = 0, num_ranks_ = 0, q_heads_ = 0;
};

}  // namespace distca::runtime
