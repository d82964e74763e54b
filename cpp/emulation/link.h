// An emulated network link in front of another transport, for tests and benchmarks of traffic that is hidden behind
// compute.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "common/error.h"
#include "common/worker.h"
#include "transport/wrapper.h"

namespace distca::emulation {

struct LinkOptions {
  double bytes_per_second = 0;          // speed of what leaves this rank, to all peers together
  std::chrono::nanoseconds latency{0};  // added to every put and every signal
  bool signal_only = false;             // every put takes the link's time for one byte
};

/// The time in which a put was on the link, by the steady clock.
struct Transfer {
  int peer;
  int64_t bytes;
  int64_t begin_ns;
  int64_t end_ns;
};

/// Puts leave one after another at the link's speed and arrive a latency later. A signal arrives a latency after it was
/// sent, but not before the earlier puts to that peer. A thread of its own delivers; therefore rows travel while the
/// rank computes. Sources are read at delivery. The destructor returns once all that was sent has arrived.
class DISTCA_EXPORT LinkTransport final : public transport::WrappingTransport {
 public:
  LinkTransport(std::unique_ptr<transport::Transport> inner, const LinkOptions& options);
  ~LinkTransport() override;

  /// Returns the puts that have arrived since the previous call.
  std::vector<Transfer> take_transfers();

  const char* name() const override { return "link"; }
  void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
           const RowExtent& extent) override;
  void signal(int peer, int64_t word, uint64_t value) override;
  void signal_after(uint64_t mark, int peer, int64_t word, uint64_t value) override;
  void quiet() override { quiet_until(mark()); }
  uint64_t mark() const override { return num_sent_; }
  void quiet_until(uint64_t mark) override;
  void cancel() noexcept override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Item {
    Clock::time_point arrival;
    uint64_t number;  // counts what this rank has sent
    Write write;
    Clock::time_point begin = {};
    Clock::time_point end = {};

    bool operator<(const Item& other) const {
      return arrival != other.arrival ? arrival < other.arrival : number < other.number;
    }
  };

  void send(const Item& item);
  void await_delivery(uint64_t mark);
  void deliver();

  LinkOptions options_;
  uint64_t num_sent_ = 0;                   // used by the rank's thread alone
  Clock::time_point free_from_ = {};        // when the link is free; used by the rank's thread alone
  std::vector<Clock::time_point> last_to_;  // arrival of the last put to each peer; used likewise
  std::set<Item> under_way_;                // from here on, all is used under the thread's mutex
  std::set<uint64_t> numbers_;              // of the items under way
  std::vector<Transfer> transfers_;
  Worker thread_;  // last: it ends before what it uses goes
};

}  // namespace distca::emulation
