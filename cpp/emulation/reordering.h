// A transport for tests, which delivers as late and as much out of order as the contract allows.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "transport/wrapper.h"

namespace distca::emulation {

/// Holds back puts and signals of another transport, and delivers them in an order drawn from a seed. It keeps only the
/// promise of the contract: a signal comes after all earlier puts to that peer. Sources are read at delivery. Some
/// calls that look at memory deliver one item, and `quiet` delivers all. What is still held at destruction is lost. The
/// same calls with the same seed give the same order.
class DISTCA_EXPORT ReorderingTransport final : public transport::WrappingTransport {
 public:
  ReorderingTransport(std::unique_ptr<transport::Transport> inner, uint64_t seed);

  const char* name() const override { return "reordering"; }
  void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
           const RowExtent& extent) override;
  void signal(int peer, int64_t word, uint64_t value) override;
  uint64_t load(int64_t word) const override;
  uint64_t peek(int peer, int64_t word) const override;
  void quiet() override;
  void cancel() noexcept override;

 protected:
  void progress() override;
  void doze(uint32_t seen, std::chrono::microseconds at_most) const override;

 private:
  void deliver_one() const;
  void deliver_sometimes() const;

  // Const calls also deliver, because to the caller the network does that on its own.
  mutable std::mt19937_64 random_;
  mutable std::vector<Write> held_;
};

}  // namespace distca::emulation
