#include "transport/link.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "transport/host_memory.h"

namespace distca::transport {
namespace {

int64_t nanoseconds(std::chrono::steady_clock::time_point t) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
}

}  // namespace

LinkTransport::LinkTransport(std::unique_ptr<Transport> inner, const LinkOptions& options)
    : inner_(std::move(inner)), options_(options) {
  require(inner_ != nullptr && !inner_->is_collective(), "a link needs a transport to wrap that is not collective");
  require(std::isfinite(options.bytes_per_second) && options.bytes_per_second >= 1, "link: ", options.bytes_per_second,
          " bytes a second; at least 1 is expected");
  require(options.latency.count() >= 0 && options.latency <= std::chrono::seconds(10), "link: a latency of ",
          options.latency.count(), " ns; 0 to 10^10 are allowed");
  last_to_.resize(static_cast<size_t>(num_ranks()));
  thread_ = std::thread([this] { deliver(); });
}

LinkTransport::~LinkTransport() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  sent_.notify_one();
  thread_.join();
}

void LinkTransport::check_peer(int peer) const {
  require(peer >= 0 && peer < num_ranks(), "rank ", peer, " is not one of ", num_ranks(), " ranks");
}

// Checked here, where the call was made, and not at delivery; heaps are symmetric.
void LinkTransport::put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride,
                        const RowView& src, const RowExtent& extent) {
  check_peer(peer);
  check_put(peer, static_cast<int64_t>(heap().size()), heap_offset, dst_row_stride, dst_head_stride, extent);
  const double bytes = options_.signal_only ? 1.0 : static_cast<double>(extent.bytes());
  const auto time = std::chrono::nanoseconds(std::llround(bytes / options_.bytes_per_second * 1e9));
  const Clock::time_point begin = std::max(Clock::now(), free_from_);
  free_from_ = begin + time;
  const Clock::time_point arrival = free_from_ + options_.latency;
  last_to_[static_cast<size_t>(peer)] = arrival;
  send({.arrival = arrival,
        .number = ++num_sent_,
        .peer = peer,
        .heap_offset = heap_offset,
        .dst_row_stride = dst_row_stride,
        .dst_head_stride = dst_head_stride,
        .src = src,
        .extent = extent,
        .begin = begin,
        .end = free_from_});
}

void LinkTransport::signal(int peer, int64_t word, uint64_t value) {
  check_peer(peer);
  static_cast<void>(inner_->load(word));  // refuses a word that does not exist
  const Clock::time_point arrival = std::max(Clock::now() + options_.latency, last_to_[static_cast<size_t>(peer)]);
  send({.arrival = arrival, .number = ++num_sent_, .peer = peer, .is_signal = true, .word = word, .value = value});
}

void LinkTransport::send(Item item) {
  {
    const std::lock_guard lock(mutex_);
    numbers_.insert(item.number);
    under_way_.insert(std::move(item));
  }
  sent_.notify_one();
}

void LinkTransport::quiet_until(uint64_t mark) {
  std::unique_lock lock(mutex_);
  delivered_.wait(lock, [&] { return numbers_.empty() || *numbers_.begin() > mark; });
  lock.unlock();
  inner_->quiet();
}

void LinkTransport::cancel() noexcept {
  // The link is free, and no row is left that a signal of the fault would have to wait for.
  free_from_ = {};
  std::fill(last_to_.begin(), last_to_.end(), Clock::time_point());
  std::unique_lock lock(mutex_);
  for (const Item& item : under_way_) numbers_.erase(item.number);
  under_way_.clear();
  delivered_.wait(lock, [&] { return numbers_.empty(); });  // what is being delivered
}

std::vector<Transfer> LinkTransport::take_transfers() {
  const std::lock_guard lock(mutex_);
  return std::exchange(transfers_, {});
}

void LinkTransport::deliver() {
  ::prctl(PR_SET_TIMERSLACK, 1UL);  // sleeps end when they should, not 50 us later
  std::unique_lock lock(mutex_);
  while (!closing_) {
    if (under_way_.empty()) {
      sent_.wait(lock);
      continue;
    }
    const auto next = under_way_.begin();
    if (Clock::now() < next->arrival) {
      sent_.wait_until(lock, next->arrival);
      continue;
    }
    const Item item = *next;
    under_way_.erase(next);
    lock.unlock();
    deliver(item);
    lock.lock();
    numbers_.erase(item.number);
    if (!item.is_signal)
      transfers_.push_back({item.peer, item.extent.bytes(), nanoseconds(item.begin), nanoseconds(item.end)});
    delivered_.notify_all();
  }
}

void LinkTransport::deliver(const Item& item) {
  if (item.is_signal)
    inner_->signal(item.peer, item.word, item.value);
  else
    inner_->put(item.peer, item.heap_offset, item.dst_row_stride, item.dst_head_stride, item.src, item.extent);
}

}  // namespace distca::transport
