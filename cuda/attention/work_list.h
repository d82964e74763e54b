// A Problem as tables for the kernels, in plain C++ without CUDA.
//
// Forward items are tiles of tasks, longest first. Backward items are blocks of keys, longest first too, except that
// those of one key/value head of a group are always in ascending order. Therefore an item that waits for the block
// before it (deterministic mode) waits for an item that was taken earlier. Where groups add to the same key gradients,
// those that store to the same rows are in the order of the groups, whatever their blocks. Items that wait for a signal
// come after all others, and with them those of groups that add to what they store.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/tables.h"

namespace distca::attention::cuda {

/// Query rows of a tile and keys of a block.
struct TileShape {
  int rows;
  int keys;
};

struct WorkList {
  std::vector<WorkItem> items;
  std::vector<StoreItem> store_items;
  std::vector<TaskEntry> tasks;
  std::vector<GroupEntry> groups;
  std::vector<RunEntry> runs;
  std::vector<int> before;
  std::vector<RowRange> bidirectional;
  std::vector<int64_t> blocks;
  std::vector<MapSpec> maps;
  // Kept for their memory: items in the order in which they were made, their costs, and where the next item of each
  // cost goes.
  std::vector<WorkItem> unsorted;
  std::vector<int32_t> costs;
  std::vector<int32_t> places;
  std::vector<int32_t> numbers;    // of each of `unsorted` among `items`
  std::vector<size_t> first_item;  // of each group, in `unsorted`
  // The same, where groups add to the same key gradients: items with those that store to the same rows just before
  // them, as they stand in `unsorted` for the first head.
  std::vector<std::pair<size_t, size_t>> follows;
  /// Where the items of a group end in `unsorted`.
  size_t end_item(size_t group) const {
    return group + 1 < first_item.size() ? first_item[group + 1] : unsorted.size();
  }
  /// Everything but the pointers, of which there is the one to `bidirectional` here.
  KernelParams params;
};

/// Rows of documents, windows and numbers of things are 32-bit in the kernels. This is the largest one.
inline constexpr int64_t kMostRows = int64_t{1} << 30;

/// Fills `list`, whose memory is used again. `signals` has one for each task or is empty. Throws InvalidArgumentError
/// where numbers do not fit or tensors are not aligned to 16 bytes.
void list_forward(const Problem& problem, std::span<const Signal> signals, TileShape shape, WorkList& list);
void list_backward(const Problem& problem, std::span<const Signal> signals, TileShape shape, WorkList& list);

}  // namespace distca::attention::cuda
