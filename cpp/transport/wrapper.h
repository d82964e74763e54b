// The common part of transports that stand in front of another one and hold back what is written through them.
#pragma once

#include <memory>

#include "common/error.h"
#include "transport/transport.h"

namespace distca::transport {

/// Hands on everything except puts and signals, which derived classes make when they see fit.
class DISTCA_EXPORT WrappingTransport : public Transport {
 public:
  Transport& inner() { return *inner_; }

  const char* name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int num_ranks() const override { return inner_->num_ranks(); }
  std::span<std::byte> heap() override { return inner_->heap(); }
  uint64_t load(int64_t word) const override { return inner_->load(word); }
  void publish(int64_t word, uint64_t value) override { inner_->publish(word, value); }
  uint64_t peek(int peer, int64_t word) const override { return inner_->peek(peer, word); }
  bool peek_asks() const override { return inner_->peek_asks(); }
  void check_peer(int peer) const override { inner_->check_peer(peer); }
  bool peek_words(int peer, int64_t first, std::span<uint64_t> values) const override {
    return inner_->peek_words(peer, first, values);
  }
  std::optional<Departure> departed() const override { return inner_->departed(); }
  std::optional<Departure> departed(int peer) const override { return inner_->departed(peer); }

 protected:
  /// A put or a signal that is still to be made.
  struct Write {
    int peer = -1;
    bool is_signal = false;
    int64_t word = 0;
    uint64_t value = 0;
    int64_t heap_offset = 0;
    int64_t dst_row_stride = 0;
    int64_t dst_head_stride = 0;
    RowView src = {};
    RowExtent extent = {};

    void make(Transport& transport) const;
  };

  explicit WrappingTransport(std::unique_ptr<Transport> inner);

  /// These check a put or a signal when the call is made. Wrong arguments, and any use in a forked child, fail here and
  /// not when the write is made.
  Write checked_put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
                    const RowExtent& extent);
  Write checked_signal(int peer, int64_t word, uint64_t value) const;

  uint32_t doorbell() const override { return inner_->doorbell(); }
  void doze(uint32_t seen, std::chrono::microseconds at_most) const override { inner_->doze(seen, at_most); }

  std::unique_ptr<Transport> inner_;
};

}  // namespace distca::transport
