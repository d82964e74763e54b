#include "transport/reordering.h"

#include <utility>

#include "transport/host_memory.h"

namespace distca::transport {

ReorderingTransport::ReorderingTransport(std::unique_ptr<Transport> inner, uint64_t seed)
    : inner_(std::move(inner)), random_(seed) {
  require(inner_ != nullptr, "a reordering transport needs a transport to wrap");
}

void ReorderingTransport::check_peer(int peer) const {
  require(peer >= 0 && peer < num_ranks(), "rank ", peer, " is not one of ", num_ranks(), " ranks");
}

// Heaps are symmetric, so this rank's own size is what the put will be checked against: a wrong one fails here, where
// it was made, and not at delivery.
void ReorderingTransport::put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride,
                              const RowView& src, const RowExtent& extent) {
  check_peer(peer);
  check_put(peer, static_cast<int64_t>(heap().size()), heap_offset, dst_row_stride, dst_head_stride, extent);
  held_.push_back({.peer = peer,
                   .heap_offset = heap_offset,
                   .dst_row_stride = dst_row_stride,
                   .dst_head_stride = dst_head_stride,
                   .src = src,
                   .extent = extent});
}

void ReorderingTransport::signal(int peer, int64_t word, uint64_t value) {
  check_peer(peer);
  static_cast<void>(inner_->load(word));  // refuses a word that does not exist
  held_.push_back({.peer = peer, .is_signal = true, .word = word, .value = value});
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

void ReorderingTransport::progress() { deliver_sometimes(); }

void ReorderingTransport::doze(uint32_t seen, std::chrono::microseconds at_most) const {
  if (held_.empty()) {
    inner_->doze(seen, at_most);
  } else {
    deliver_one();  // nobody else would, and the one who waits may wait for an answer to this
  }
}

void ReorderingTransport::deliver_sometimes() const {
  if (!held_.empty() && random_() % 4 == 0) deliver_one();
}

void ReorderingTransport::deliver_one() const {
  size_t pick = static_cast<size_t>(random_() % held_.size());
  if (const Item& drawn = held_[pick]; drawn.is_signal) {
    // The earliest item that must come before it has nothing that must come before itself.
    for (size_t i = 0; i < pick; ++i) {
      const Item& earlier = held_[i];
      if (earlier.peer == drawn.peer && !earlier.is_signal) {
        pick = i;
        break;
      }
    }
  }
  const Item item = held_[pick];
  held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(pick));
  if (item.is_signal) {
    inner_->signal(item.peer, item.word, item.value);
  } else {
    inner_->put(item.peer, item.heap_offset, item.dst_row_stride, item.dst_head_stride, item.src, item.extent);
  }
}

}  // namespace distca::transport
