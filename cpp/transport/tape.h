// What was queued on the streams of a rank, so that it can be queued again: operations in order, each with a table of
// its own of all that it reads, which may be filled anew between one time and the next.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "common/error.h"

namespace distca::transport {

/// An array of a table.
struct TablePart {
  const char* name;
  std::span<const std::byte> bytes;
  size_t element_bytes;
  bool is_one = false;  // a value that is there once, whatever the plan
};
template <class T>
TablePart table_part(const char* name, std::span<T> values) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {name, std::as_bytes(values), sizeof(T)};
}
template <class T>
TablePart table_part(const char* name, const std::vector<T>& values) {
  return table_part(name, std::span<const T>(values));
}
template <class T>
TablePart table_value(const char* name, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {name, std::as_bytes(std::span(&value, 1)), sizeof(T), true};
}

/// The arrays that one operation reads when its turn comes, in one block of memory.
class DISTCA_EXPORT Table {
 public:
  static constexpr size_t kMaxParts = 6;

  /// With room for `headroom` times what there is; with 1 for just that.
  explicit Table(std::span<const TablePart> parts, double headroom = 1);

  /// Throws CapacityError unless these parts fit into the room.
  void check(const char* operation, std::span<const TablePart> parts) const;
  /// Takes the place of what was there.
  void fill(std::span<const TablePart> parts);
  /// Takes over what another table of the same capacity holds.
  void fill(const Table& other);

  template <class T>
  std::span<const T> get(size_t part) const {
    return {reinterpret_cast<const T*>(memory_.data() + offsets_[part]), counts_[part]};
  }

 private:
  std::array<size_t, kMaxParts> counts_ = {}, capacities_ = {}, offsets_ = {};
  std::vector<std::byte> memory_;
};

/// First the operations join it, in the order in which they are queued. Later the same operations come again, in the
/// same order: they fill the tables that the next `replay` reads.
class DISTCA_EXPORT Tape {
 public:
  /// Queues an operation that reads the table.
  using Start = std::function<void(const std::shared_ptr<const Table>& table)>;

  /// Tables get room for `headroom` times what they hold at first, and for some elements where that is little.
  explicit Tape(double headroom) : headroom_(headroom) {}

  /// The next operation. Of a tape that is complete: what will be in its table after `commit`. Throws CapacityError
  /// where that does not fit.
  void add(const char* operation, std::span<const TablePart> parts, Start start);
  /// Operations come from the first one on again; what was not committed is forgotten.
  void rewind();
  /// All operations have come again: their tables change. Nobody may be reading them.
  void commit();
  /// Queues all operations.
  void replay() const;

  size_t num_operations() const { return operations_.size(); }

 private:
  struct Operation {
    const char* name;
    std::shared_ptr<Table> table, staged;
    Start start;
  };

  double headroom_;
  bool is_complete_ = false;
  size_t next_ = 0;
  std::vector<Operation> operations_;
};

}  // namespace distca::transport
