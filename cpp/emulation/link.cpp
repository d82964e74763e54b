#include "emulation/link.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace distca::emulation {

using namespace transport;

namespace {

int64_t nanoseconds(std::chrono::steady_clock::time_point t) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
}

LinkOptions checked(const LinkOptions& options) {
  require(std::isfinite(options.bytes_per_second) && options.bytes_per_second >= 1, "link: ", options.bytes_per_second,
          " bytes a second; at least 1 is expected");
  require(options.latency.count() >= 0 && options.latency <= std::chrono::seconds(10), "link: a latency of ",
          options.latency.count(), " ns; 0 to 10^10 are allowed");
  return options;
}

}  // namespace

LinkTransport::LinkTransport(std::unique_ptr<Transport> inner, const LinkOptions& options)
    : WrappingTransport(std::move(inner)),
      options_(checked(options)),
      last_to_(static_cast<size_t>(inner_->num_ranks())),
      thread_("distca link", [this] { deliver(); }) {}

LinkTransport::~LinkTransport() {
  // A peer that learns that this rank has closed looks at its words for the last time.
  if (!thread_.is_forked()) await_delivery(num_sent_);
}

void LinkTransport::put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride,
                        const RowView& src, const RowExtent& extent) {
  const Write write = checked_put(peer, heap_offset, dst_row_stride, dst_head_stride, src, extent);
  const double bytes = options_.signal_only ? 1.0 : static_cast<double>(extent.bytes());
  const auto time = std::chrono::nanoseconds(std::llround(bytes / options_.bytes_per_second * 1e9));
  const Clock::time_point begin = std::max(Clock::now(), free_from_);
  free_from_ = begin + time;
  const Clock::time_point arrival = free_from_ + options_.latency;
  last_to_[static_cast<size_t>(peer)] = arrival;
  send({.arrival = arrival, .number = ++num_sent_, .write = write, .begin = begin, .end = free_from_});
}

void LinkTransport::signal(int peer, int64_t word, uint64_t value) {
  const Write write = checked_signal(peer, word, value);
  const Clock::time_point arrival = std::max(Clock::now() + options_.latency, last_to_[static_cast<size_t>(peer)]);
  send({.arrival = arrival, .number = ++num_sent_, .write = write});
}

void LinkTransport::signal_after(uint64_t mark, int peer, int64_t word, uint64_t value) {
  const Write write = checked_signal(peer, word, value);
  Clock::time_point arrival = std::max(Clock::now() + options_.latency, last_to_[static_cast<size_t>(peer)]);
  {
    const std::lock_guard lock(thread_.mutex());
    for (const Item& item : under_way_)
      if (item.number <= mark) arrival = std::max(arrival, item.arrival);
  }
  send({.arrival = arrival, .number = ++num_sent_, .write = write});
}

void LinkTransport::send(const Item& item) {
  {
    const std::lock_guard lock(thread_.mutex());
    numbers_.insert(item.number);
    under_way_.insert(item);
  }
  thread_.posted().notify_one();
}

void LinkTransport::quiet_until(uint64_t mark) {
  await_delivery(mark);
  inner_->quiet();
}

void LinkTransport::await_delivery(uint64_t mark) {
  std::unique_lock lock(thread_.mutex());
  thread_.done().wait(lock, [&] { return numbers_.empty() || *numbers_.begin() > mark; });
}

void LinkTransport::cancel() noexcept {
  if (thread_.is_forked()) return;
  // The link is free from now on, and no row is left for which a signal of the fault would have to wait.
  free_from_ = {};
  std::fill(last_to_.begin(), last_to_.end(), Clock::time_point());
  std::unique_lock lock(thread_.mutex());
  for (const Item& item : under_way_) numbers_.erase(item.number);
  under_way_.clear();
  thread_.done().wait(lock, [&] { return numbers_.empty(); });  // the item that is being delivered
  inner_->cancel();
}

std::vector<Transfer> LinkTransport::take_transfers() {
  const std::lock_guard lock(thread_.mutex());
  return std::exchange(transfers_, {});
}

void LinkTransport::deliver() {
  ::prctl(PR_SET_TIMERSLACK, 1UL);  // sleeps end when they should, not 50 us later
  std::unique_lock lock(thread_.mutex());
  while (!thread_.is_stopping()) {
    if (under_way_.empty()) {
      thread_.posted().wait(lock);
      continue;
    }
    const auto next = under_way_.begin();
    if (Clock::now() < next->arrival) {
      thread_.posted().wait_until(lock, next->arrival);
      continue;
    }
    const Item item = *next;
    under_way_.erase(next);
    lock.unlock();
    item.write.make(*inner_);
    lock.lock();
    numbers_.erase(item.number);
    if (!item.write.is_signal)
      transfers_.push_back(
          {item.write.peer, item.write.extent.bytes(), nanoseconds(item.begin), nanoseconds(item.end)});
    thread_.done().notify_all();
  }
}

}  // namespace distca::emulation
