#include "transport/wrapper.h"

#include <utility>

#include "transport/host_memory.h"

namespace distca::transport {

void WrappingTransport::Write::make(Transport& transport) const {
  if (is_signal)
    transport.signal(peer, word, value);
  else
    transport.put(peer, heap_offset, dst_row_stride, dst_head_stride, src, extent);
}

WrappingTransport::WrappingTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {
  require(inner_ != nullptr && !inner_->is_collective(),
          "a wrapping transport needs one to wrap that is not collective");
}

// Heaps have equal size. Therefore the put is checked against this rank's own heap.
WrappingTransport::Write WrappingTransport::checked_put(int peer, int64_t heap_offset, int64_t dst_row_stride,
                                                        int64_t dst_head_stride, const RowView& src,
                                                        const RowExtent& extent) {
  inner_->check_peer(peer);
  check_put(peer, static_cast<int64_t>(heap().size()), heap_offset, dst_row_stride, dst_head_stride, extent);
  return {.peer = peer,
          .heap_offset = heap_offset,
          .dst_row_stride = dst_row_stride,
          .dst_head_stride = dst_head_stride,
          .src = src,
          .extent = extent};
}

WrappingTransport::Write WrappingTransport::checked_signal(int peer, int64_t word, uint64_t value) const {
  static_cast<void>(inner_->peek(peer, word));
  return {.peer = peer, .is_signal = true, .word = word, .value = value};
}

}  // namespace distca::transport
