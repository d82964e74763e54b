#include "emulation/reordering.h"

#include <utility>

namespace distca::emulation {

using namespace transport;

ReorderingTransport::ReorderingTransport(std::unique_ptr<Transport> inner, uint64_t seed)
    : WrappingTransport(std::move(inner)), random_(seed) {}

void ReorderingTransport::put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride,
                              const RowView& src, const RowExtent& extent) {
  held_.push_back(checked_put(peer, heap_offset, dst_row_stride, dst_head_stride, src, extent));
}

void ReorderingTransport::signal(int peer, int64_t word, uint64_t value) {
  held_.push_back(checked_signal(peer, word, value));
}

uint64_t ReorderingTransport::load(int64_t word) const {
  deliver_sometimes();
  return inner_->load(word);
}

uint64_t ReorderingTransport::peek(int peer, int64_t word) const {
  deliver_sometimes();
  return inner_->peek(peer, word);
}

void ReorderingTransport::quiet() {
  while (!held_.empty()) deliver_one();
  inner_->quiet();
}

void ReorderingTransport::cancel() noexcept {
  held_.clear();
  inner_->cancel();
}

void ReorderingTransport::progress() { deliver_sometimes(); }

void ReorderingTransport::doze(uint32_t seen, std::chrono::microseconds at_most) const {
  if (held_.empty()) {
    WrappingTransport::doze(seen, at_most);
  } else {
    deliver_one();  // nobody else would, and this rank may wait for an answer to it
  }
}

void ReorderingTransport::deliver_sometimes() const {
  if (!held_.empty() && random_() % 4 == 0) deliver_one();
}

void ReorderingTransport::deliver_one() const {
  size_t pick = static_cast<size_t>(random_() % held_.size());
  if (const Write& drawn = held_[pick]; drawn.is_signal) {
    // The earliest put to that peer must come before the signal, and nothing must come before that put.
    for (size_t i = 0; i < pick; ++i) {
      const Write& earlier = held_[i];
      if (earlier.peer == drawn.peer && !earlier.is_signal) {
        pick = i;
        break;
      }
    }
  }
  const Write write = held_[pick];
  held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(pick));
  write.make(*inner_);
}

}  // namespace distca::emulation
