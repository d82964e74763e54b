// The memory that rows lie in, the host's or a GPU's, and how rows are copied there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "common/error.h"
#include "common/rows.h"

namespace distca {

/// The memory of one rank. What it starts is done in the order in which it was started.
class DISTCA_EXPORT Memory {
 public:
  virtual ~Memory() = default;

  /// "cpu", or "cuda:" and a number.
  virtual std::string device() const = 0;
  /// Allocates zero-filled memory, aligned to 256 bytes.
  virtual std::shared_ptr<std::byte> allocate(int64_t bytes) = 0;
  /// Starts a copy between views that do not overlap.
  virtual void copy(const RowView& to, const RowView& from, const RowExtent& n) = 0;
  /// Waits until all that was started is done.
  virtual void finish() = 0;
};

/// Memory of the host, of any content, aligned to 256 bytes.
inline std::shared_ptr<std::byte> host_memory(size_t bytes) {
  constexpr auto alignment = std::align_val_t(256);
  return {static_cast<std::byte*>(::operator new(bytes, alignment)),
          [](std::byte* p) { ::operator delete(p, std::align_val_t(256)); }};
}

/// What Memory::allocate gives on the host.
inline std::shared_ptr<std::byte> zeroed_host_memory(int64_t bytes) {
  std::shared_ptr<std::byte> memory = host_memory(static_cast<size_t>(bytes));
  std::memset(memory.get(), 0, static_cast<size_t>(bytes));
  return memory;
}

}  // namespace distca
