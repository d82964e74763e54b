// A table is the arrays that one queued operation reads when its turn comes, in one block of memory: first how many
// elements each array has, then the elements. On a device kernels read both there.
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

/// A part of a table: an array, a single value (kValue), or a single value that no plan may change (kFixed).
struct TablePart {
  enum class Kind { kArray, kValue, kFixed };

  const char* name;
  std::span<const std::byte> bytes;
  size_t element_bytes;
  Kind kind = Kind::kArray;

  size_t count() const { return bytes.size() / element_bytes; }
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
  return {name, std::as_bytes(std::span(&value, 1)), sizeof(T), TablePart::Kind::kValue};
}
/// Its bytes are compared. Therefore it must have no padding.
template <class T>
TablePart fixed_value(const char* name, const T& value) {
  static_assert(std::has_unique_object_representations_v<T>);
  return {name, std::as_bytes(std::span(&value, 1)), sizeof(T), TablePart::Kind::kFixed};
}

/// The places of the parts of a table.
class DISTCA_EXPORT TableLayout {
 public:
  static constexpr size_t kMaxParts = 10;
  /// The alignment of each part, which is enough for the arrays of any kernel.
  static constexpr size_t kAlignment = 128;

  /// Leaves room for `headroom` times the elements of each array, and for at least a few hundred. With a headroom of 1
  /// there is room for just these elements.
  explicit TableLayout(std::span<const TablePart> parts, double headroom = 1);

  size_t bytes() const { return bytes_; }
  /// The number of elements that there is room for.
  size_t capacity(size_t part) const { return capacities_[part]; }
  size_t offset(size_t part) const { return offsets_[part]; }
  /// Writes the parts, with their counts, into memory of `bytes()`.
  void write(std::span<const TablePart> parts, std::byte* memory) const;

 private:
  std::array<size_t, kMaxParts> capacities_ = {}, offsets_ = {};
  size_t bytes_ = 0;
};

/// Memory that the host writes, and where a device reads it: the same place, or another one to which it is copied.
struct TableMemory {
  std::shared_ptr<std::byte> host;
  std::byte* device = nullptr;
};
using AllocateTable = std::function<TableMemory(size_t bytes)>;
/// Allocates memory of the host, which also stands for the device's.
DISTCA_EXPORT TableMemory allocate_on_host(size_t bytes);

class DISTCA_EXPORT Table {
 public:
  explicit Table(std::span<const TablePart> parts, double headroom = 1,
                 const AllocateTable& allocate = allocate_on_host);

  const TableLayout& layout() const { return layout_; }
  /// Throws CapacityError unless these parts may take the place of those that there are.
  void check(const char* operation, std::span<const TablePart> parts) const;
  const std::byte* host() const { return memory_.host.get(); }
  std::byte* device() const { return memory_.device; }

  /// Replaces the contents by these parts.
  void fill(std::span<const TablePart> parts) { layout_.write(parts, memory_.host.get()); }
  /// Replaces the contents by those of another table of the same layout.
  void fill(const Table& other);

  template <class T>
  std::span<const T> get(size_t part) const {
    const std::byte* const memory = memory_.host.get();
    return {reinterpret_cast<const T*>(memory + layout_.offset(part)), reinterpret_cast<const uint64_t*>(memory)[part]};
  }

 private:
  TableLayout layout_;
  TableMemory memory_;
};

}  // namespace distca::transport
