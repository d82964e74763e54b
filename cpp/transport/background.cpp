#include "transport/background.h"

#include <pthread.h>

#include <condition_variable>
#include <csignal>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "transport/fork_guard.h"
#include "transport/host_memory.h"

namespace distca::transport {
namespace {

/// A put, or a signal.
struct Item {
  int peer = -1;
  bool is_signal = false;
  int64_t word = 0;
  uint64_t value = 0;
  int64_t heap_offset = 0;
  int64_t dst_row_stride = 0;
  int64_t dst_head_stride = 0;
  RowView src = {};
  RowExtent extent = {};
};

/// The thread, and what it shares with the one that posts.
class Worker {
 public:
  explicit Worker(Transport& inner) : inner_(inner) {
    sigset_t all, before;  // signals are for the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void post(const Item& item) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(item);
      ++num_posted_;
    }
    posted_news_.notify_one();
  }

  uint64_t num_posted() const { return num_posted_; }

  void wait(uint64_t posted) {
    std::unique_lock lock(mutex_);
    done_news_.wait(lock, [&] { return num_done_ >= posted; });
  }

  void cancel() {
    std::unique_lock lock(mutex_);
    cancelled_ = true;  // the thread drops what it has taken
    num_done_ += queue_.size();
    queue_.clear();
    done_news_.wait(lock, [&] { return num_done_ == num_posted_; });
    cancelled_ = false;
  }

  /// Makes what is posted and ends the thread.
  void join() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    posted_news_.notify_one();
    thread_.join();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      posted_news_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      taken_.swap(queue_);
      for (const Item& item : taken_) {
        if (!cancelled_) {
          lock.unlock();
          make(item);
          lock.lock();
        }
        ++num_done_;
      }
      taken_.clear();
      done_news_.notify_all();
    }
  }

  void make(const Item& item) {
    if (item.is_signal) {
      inner_.signal(item.peer, item.word, item.value);
    } else {
      inner_.put(item.peer, item.heap_offset, item.dst_row_stride, item.dst_head_stride, item.src, item.extent);
    }
  }

  Transport& inner_;
  std::mutex mutex_;
  std::condition_variable posted_news_, done_news_;
  std::vector<Item> queue_, taken_;  // they only grow
  uint64_t num_posted_ = 0, num_done_ = 0;
  bool cancelled_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace

class BackgroundTransport final : public Transport {
 public:
  explicit BackgroundTransport(std::unique_ptr<Transport> inner)
      : inner_(std::move(inner)), generation_(fork_generation()), worker_(std::make_unique<Worker>(*inner_)) {}

  ~BackgroundTransport() override {
    if (is_forked())
      static_cast<void>(worker_.release());  // its thread is the parent's; there is nothing to end here
    else
      worker_->join();
  }

  const char* name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int num_ranks() const override { return inner_->num_ranks(); }
  std::span<std::byte> heap() override { return inner_->heap(); }

  // A wrong argument fails here, where it was made, and so does any use in a forked child: `peek` refuses it.
  void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
           const RowExtent& extent) override {
    static_cast<void>(inner_->peek(peer, 0));
    check_put(peer, static_cast<int64_t>(heap().size()), heap_offset, dst_row_stride, dst_head_stride, extent);
    worker_->post({.peer = peer,
                   .heap_offset = heap_offset,
                   .dst_row_stride = dst_row_stride,
                   .dst_head_stride = dst_head_stride,
                   .src = src,
                   .extent = extent});
  }
  void signal(int peer, int64_t word, uint64_t value) override {
    static_cast<void>(inner_->peek(peer, word));
    worker_->post({.peer = peer, .is_signal = true, .word = word, .value = value});
  }

  uint64_t load(int64_t word) const override { return inner_->load(word); }
  void publish(int64_t word, uint64_t value) override { inner_->publish(word, value); }
  uint64_t peek(int peer, int64_t word) const override { return inner_->peek(peer, word); }

  uint64_t mark() const override { return worker_->num_posted(); }
  void quiet() override { quiet_until(mark()); }
  void quiet_until(uint64_t mark) override { worker_->wait(mark); }
  void cancel() noexcept override {
    if (!is_forked()) worker_->cancel();
  }

  std::optional<Departure> departed() const override { return inner_->departed(); }
  std::optional<Departure> departed(int peer) const override { return inner_->departed(peer); }

 protected:
  uint32_t doorbell() const override { return inner_->doorbell(); }
  void doze(uint32_t seen, std::chrono::microseconds at_most) const override { inner_->doze(seen, at_most); }

 private:
  bool is_forked() const { return generation_ != fork_generation(); }

  std::unique_ptr<Transport> inner_;
  uint32_t generation_;
  std::unique_ptr<Worker> worker_;  // goes before `inner_`
};

std::unique_ptr<Transport> make_background(std::unique_ptr<Transport> inner) {
  require(inner != nullptr, "a background transport needs a transport to hand puts to");
  return std::make_unique<BackgroundTransport>(std::move(inner));
}

}  // namespace distca::transport
