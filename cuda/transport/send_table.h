// Messages to peers that load and store do not reach: rows are packed into a send arena as they will lie in the peer's
// heap, so that a few large pieces of it are sent. Knows nothing of CUDA.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/rows.h"

namespace distca::cuda {

/// Bytes that go from this rank's send arena to the peer's heap as they are.
struct SendPiece {
  int64_t from, to;  // offsets
  int64_t bytes;
};

/// Collects what goes to one peer before a signal.
class SendTable {
 public:
  explicit SendTable(int64_t arena_bytes) : arena_bytes_(arena_bytes) {}

  /// Where rows that go to `to` in the peer's heap are to be packed: an offset in the send arena, or -1 where it is
  /// full. Gaps between heads or rows are sent too: the extent is the message's own.
  int64_t add(int64_t to, int64_t row_stride, int64_t head_stride, const RowExtent& n);
  /// The pieces since the last call, in order. Rows that lie one after another on both sides are one piece.
  std::vector<SendPiece> take();
  /// What was taken has been sent: its room is free again.
  void reset() { used_ = 0; }

 private:
  int64_t arena_bytes_;
  int64_t used_ = 0;
  std::vector<SendPiece> pieces_;
};

}  // namespace distca::cuda
