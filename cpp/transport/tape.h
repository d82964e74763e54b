// What was queued on the streams of a rank, so that it can be queued again: operations in order, each with a table of
// its own of all that it reads, which may be filled anew between one time and the next.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "common/error.h"
#include "transport/table.h"

namespace distca::transport {

/// What the streams of a device bring to a tape.
class TapeDevice {
 public:
  virtual ~TapeDevice() = default;
  virtual TableMemory allocate(size_t bytes) = 0;
  /// Returns when the tables that were committed last have been read. Throws InvalidArgumentError where nobody comes
  /// to read them.
  virtual void await_readers() = 0;
  /// The tables have changed.
  virtual void commit() = 0;
};

/// First the operations join it, in the order in which they are queued. Later the same operations come again, in the
/// same order: they fill the tables that the next `replay` reads.
class DISTCA_EXPORT Tape {
 public:
  /// Queues an operation that reads the table.
  using Start = std::function<void(const std::shared_ptr<const Table>& table)>;

  /// Tables get room for `headroom` times what they hold at first, and for some elements where that is little.
  explicit Tape(double headroom) : headroom_(headroom) {}

  void set_device(std::shared_ptr<TapeDevice> device) { device_ = std::move(device); }
  TapeDevice* device() const { return device_.get(); }

  /// The next operation; returns it with its table. Of a tape that is complete: what will be in its table after
  /// `commit`, and returns null. Throws CapacityError where that does not fit.
  std::shared_ptr<const Table> add(const char* operation, std::span<const TablePart> parts, Start start);
  /// Operations come from the first one on again; what was not committed is forgotten.
  void rewind();
  /// Returns when the tables may change.
  void await_readers() const;
  /// All operations have come again: their tables change.
  void commit();
  /// Queues all operations.
  void replay() const;

  bool is_complete() const { return is_complete_; }

  /// Whether operations were also queued as they joined it, into the graph that a device captures: that is launched
  /// instead of a `replay`.
  bool is_captured() const { return is_captured_; }
  void set_captured() { is_captured_ = true; }

 private:
  struct Operation {
    const char* name;
    std::shared_ptr<Table> table, staged;
    Start start;
  };

  double headroom_;
  std::shared_ptr<TapeDevice> device_;
  bool is_complete_ = false, is_captured_ = false;
  size_t next_ = 0;
  std::vector<Operation> operations_;
};

}  // namespace distca::transport
