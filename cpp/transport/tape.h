// A tape keeps what was queued on the streams of a rank, so that it can be queued again: the operations in order, each
// with a table of its own. A table holds all that its operation reads, and may be filled anew before the operations are
// queued again.
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

/// The functions that a tape needs of the streams of a device.
class TapeDevice {
 public:
  virtual ~TapeDevice() = default;
  virtual TableMemory allocate(size_t bytes) = 0;
  /// Returns when the tables that were committed last have been read. Throws InvalidArgumentError if nothing is queued
  /// that will read them.
  virtual void await_readers() = 0;
  /// Says that the tables have changed.
  virtual void commit() = 0;
};

/// First the operations join the tape, in the order in which they are queued. Later the same operations come again, in
/// the same order, and fill the tables that the next `replay` reads.
class DISTCA_EXPORT Tape {
 public:
  /// Queues an operation that reads the table.
  using Start = std::function<void(const std::shared_ptr<const Table>& table)>;

  /// Tables get room for `headroom` times what they hold at first, and for at least a few hundred elements.
  explicit Tape(double headroom) : headroom_(headroom) {}

  void set_device(std::shared_ptr<TapeDevice> device) { device_ = std::move(device); }
  TapeDevice* device() const { return device_.get(); }

  /// Adds the next operation and returns its table. If the tape is complete, it keeps what will be in the operation's
  /// table after `commit`, and returns null; throws CapacityError if that does not fit.
  std::shared_ptr<const Table> add(const char* operation, std::span<const TablePart> parts, Start start);
  /// Makes operations come again from the first one on. What was not committed is forgotten.
  void rewind();
  /// Returns when the tables may change.
  void await_readers() const;
  /// Writes the tables, once all operations have come again.
  void commit();
  /// Queues all operations.
  void replay() const;

  bool is_complete() const { return is_complete_; }

  /// Whether operations were also queued when they joined the tape, into a graph that a device captures. The graph is
  /// then launched instead of a `replay`.
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
