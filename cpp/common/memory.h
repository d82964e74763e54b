// The memory that rows lie in, the host's or a GPU's, and how rows are copied there.
#pragma once

#include <cstdint>
#include <memory>
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

}  // namespace distca
