// A thread of the library's own, and a queue whose items such a thread takes one by one.
//
// The system's signals are for the threads of the program: a worker has them all blocked. In a forked child the thread
// is the parent's: there is nothing to end, and a mutex or condition that it held or waited for can be neither used nor
// destroyed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/error.h"

namespace distca {

/// A thread, and what it shares with others. The last member of its owner, so that it ends before what it uses goes.
class DISTCA_EXPORT Worker {
 public:
  /// Starts the thread. `body` returns soon after `is_stopping`; debuggers show the name, of at most 15 characters.
  Worker(const char* name, std::function<void()> body);
  /// Stops and joins.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  bool is_forked() const;
  std::mutex& mutex() { return shared_->mutex; }
  /// Notified when there is something for the thread to do, or it is to end; both wait for it by `mutex`.
  std::condition_variable& posted() { return shared_->posted; }
  /// Notified by the thread when it has done something.
  std::condition_variable& done() { return shared_->done; }

  /// Tells the thread to end.
  void stop();
  /// Whether it was told so. Under the mutex.
  bool is_stopping() const { return shared_->is_stopping; }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable posted, done;
    bool is_stopping = false;
    std::thread thread;
  };
  std::unique_ptr<Shared> shared_;
  uint32_t generation_ = 0;
};

/// Items that a worker takes in their order. Those that wait at destruction are taken then. In a forked child nothing
/// waits for them.
template <class Item>
class WorkQueue {
 public:
  /// `take` is called by the worker; it does not throw.
  WorkQueue(const char* name, std::function<void(Item& item)> take)
      : take_(std::move(take)), worker_(name, [this] { run(); }) {}

  ~WorkQueue() {
    // The parent's worker may have been changing them.
    if (is_forked()) static_cast<void>(new std::pair(std::move(queue_), std::move(taken_)));
  }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  bool is_forked() const { return worker_.is_forked(); }

  void post(Item item) {
    {
      const std::lock_guard lock(worker_.mutex());
      queue_.push_back(std::move(item));
      ++num_posted_;
    }
    worker_.posted().notify_one();
  }

  /// How many items were posted. For the thread that posts them.
  uint64_t num_posted() const { return num_posted_; }
  /// Returns when so many items are done.
  void wait_until(uint64_t number) {
    if (is_forked()) return;
    std::unique_lock lock(worker_.mutex());
    worker_.done().wait(lock, [&] { return num_done_ >= number; });
  }
  /// Returns when all items are done, those too that others post meanwhile.
  void drain() {
    if (is_forked()) return;
    std::unique_lock lock(worker_.mutex());
    worker_.done().wait(lock, [&] { return num_done_ == num_posted_; });
  }

  /// Drops the items that wait; returns when none is being taken.
  void cancel() {
    if (is_forked()) return;
    std::unique_lock lock(worker_.mutex());
    is_cancelled_ = true;  // the worker drops what it holds
    num_done_ += queue_.size();
    queue_.clear();
    worker_.done().wait(lock, [&] { return num_done_ == num_posted_; });
    is_cancelled_ = false;
  }

 private:
  void run() {
    std::unique_lock lock(worker_.mutex());
    while (true) {
      worker_.posted().wait(lock, [&] { return worker_.is_stopping() || !queue_.empty(); });
      if (queue_.empty()) return;
      taken_.swap(queue_);
      for (Item& item : taken_) {
        if (!is_cancelled_) {
          lock.unlock();
          take_(item);
          lock.lock();
        }
        ++num_done_;
      }
      taken_.clear();
      worker_.done().notify_all();
    }
  }

  std::function<void(Item& item)> take_;
  std::vector<Item> queue_, taken_;  // they only grow
  uint64_t num_posted_ = 0, num_done_ = 0;
  bool is_cancelled_ = false;
  Worker worker_;  // last: it ends before what it uses goes
};

}  // namespace distca
