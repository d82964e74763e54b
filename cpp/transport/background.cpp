#include "transport/background.h"

#include <utility>

#include "common/worker.h"
#include "transport/wrapper.h"

namespace distca::transport {
namespace {

class BackgroundTransport final : public WrappingTransport {
 public:
  explicit BackgroundTransport(std::unique_ptr<Transport> inner)
      : WrappingTransport(std::move(inner)),
        writes_("distca puts", [this](const Write& write) { write.make(*inner_); }) {}

  void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
           const RowExtent& extent) override {
    writes_.post(checked_put(peer, heap_offset, dst_row_stride, dst_head_stride, src, extent));
  }
  void signal(int peer, int64_t word, uint64_t value) override { writes_.post(checked_signal(peer, word, value)); }

  // Puts of the inner transport are made when they return.
  void signal_after(uint64_t /*mark*/, int peer, int64_t word, uint64_t value) override { signal(peer, word, value); }

  uint64_t mark() const override { return writes_.num_posted(); }
  void quiet() override { writes_.drain(); }
  void quiet_until(uint64_t mark) override { writes_.wait_until(mark); }
  void cancel() noexcept override {
    writes_.cancel();
    if (!writes_.is_forked()) inner_->cancel();
  }

 private:
  WorkQueue<Write> writes_;  // last: it ends before what it uses goes
};

}  // namespace

std::unique_ptr<Transport> make_background(std::unique_ptr<Transport> inner) {
  return std::make_unique<BackgroundTransport>(std::move(inner));
}

}  // namespace distca::transport
