#include "transport/background.h"

#include <mutex>
#include <utility>
#include <vector>

#include "transport/wrapper.h"

namespace distca::transport {
namespace {

class BackgroundTransport final : public WrappingTransport {
 public:
  explicit BackgroundTransport(std::unique_ptr<Transport> inner)
      : WrappingTransport(std::move(inner)), thread_([this] { run(); }) {}

  ~BackgroundTransport() override {
    if (thread_.is_forked()) return;
    {
      const std::lock_guard lock(thread_.mutex());
      stopping_ = true;
    }
    thread_.posted().notify_one();
  }

  void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
           const RowExtent& extent) override {
    post(checked_put(peer, heap_offset, dst_row_stride, dst_head_stride, src, extent));
  }
  void signal(int peer, int64_t word, uint64_t value) override { post(checked_signal(peer, word, value)); }

  uint64_t mark() const override { return num_posted_; }
  void quiet() override { quiet_until(mark()); }
  void quiet_until(uint64_t mark) override {
    std::unique_lock lock(thread_.mutex());
    thread_.made().wait(lock, [&] { return num_done_ >= mark; });
  }

  void cancel() noexcept override {
    if (thread_.is_forked()) return;
    std::unique_lock lock(thread_.mutex());
    cancelled_ = true;  // the thread drops what it has taken
    num_done_ += queue_.size();
    queue_.clear();
    thread_.made().wait(lock, [&] { return num_done_ == num_posted_; });
    cancelled_ = false;
    inner_->cancel();
  }

 private:
  void post(const Write& write) {
    {
      const std::lock_guard lock(thread_.mutex());
      queue_.push_back(write);
      ++num_posted_;
    }
    thread_.posted().notify_one();
  }

  void run() {
    std::unique_lock lock(thread_.mutex());
    while (true) {
      thread_.posted().wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      taken_.swap(queue_);
      for (const Write& write : taken_) {
        if (!cancelled_) {
          lock.unlock();
          write.make(*inner_);
          lock.lock();
        }
        ++num_done_;
      }
      taken_.clear();
      thread_.made().notify_all();
    }
  }

  std::vector<Write> queue_, taken_;  // they only grow
  uint64_t num_posted_ = 0, num_done_ = 0;
  bool cancelled_ = false, stopping_ = false;
  WritingThread thread_;  // last: it ends before what it uses goes
};

}  // namespace

std::unique_ptr<Transport> make_background(std::unique_ptr<Transport> inner) {
  return std::make_unique<BackgroundTransport>(std::move(inner));
}

}  // namespace distca::transport
