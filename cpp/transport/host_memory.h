// Memory of one rank that its peers write into with plain stores, and the part of a transport that needs no more than
// this.
//
// A region is one mapping: a header (doorbell, sleepers, state), the signal words, then the heap from a page boundary
// on. Loopback maps every region once. Shm maps each of them in each process. All else is the same.
#pragma once

#include <atomic>
#include <vector>

#include "common/error.h"
#include "common/fork_guard.h"
#include "transport/transport.h"

namespace distca::transport {

/// Throws InvalidArgumentError unless heap and signals have sizes that a region can have.
void check_region_sizes(int64_t heap_bytes, int64_t num_signals);
/// The bytes of a region, a multiple of the page size.
int64_t region_bytes(int64_t heap_bytes, int64_t num_signals);
/// Throws InvalidArgumentError unless rows of that extent and those strides lie within a heap of `heap_bytes`.
DISTCA_EXPORT void check_put(int peer, int64_t heap_bytes, int64_t heap_offset, int64_t dst_row_stride,
                             int64_t dst_head_stride, const RowExtent& extent);

/// Owns mapped pages: zero-filled private ones, or those of a file descriptor. Forked children do not inherit them.
class DISTCA_EXPORT Mapping {
 public:
  static Mapping anonymous(int64_t bytes);
  static Mapping shared(int fd, int64_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;

  std::byte* data() const { return data_; }

 private:
  Mapping(int flags, int fd, int64_t bytes);

  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  uint32_t generation_ = 0;
};

enum class RankState : uint32_t { kPresent = 0, kClosed = 1, kDied = 2 };

/// A view of a region. Zero-filled pages are the region of a rank that is present.
class Region {
 public:
  Region(std::byte* base, int64_t heap_bytes, int64_t num_signals);
  /// A region whose heap lies elsewhere, for example on a GPU.
  Region(std::byte* base, int64_t num_signals, std::span<std::byte> heap);

  std::span<std::byte> heap() const { return heap_; }
  std::atomic_ref<uint64_t> word(int64_t index) const;

  RankState state() const { return RankState{std::atomic_ref(header_->state).load(std::memory_order_acquire)}; }
  void set_state(RankState s) const {
    std::atomic_ref(header_->state).store(static_cast<uint32_t>(s), std::memory_order_release);
  }

  uint32_t doorbell() const { return std::atomic_ref(header_->doorbell).load(std::memory_order_acquire); }
  /// Changes the doorbell and wakes threads that sleep on it.
  void ring() const;
  /// Sleeps until the doorbell differs from `seen` or the time is over; may return early.
  void sleep(uint32_t seen, std::chrono::microseconds at_most) const;

 private:
  friend int64_t region_bytes(int64_t heap_bytes, int64_t num_signals);
  struct Header {
    alignas(64) uint32_t doorbell;
    uint32_t sleepers;
    alignas(64) uint32_t state;  // a line of its own: peers poll it
  };

  Header* header_;
  std::span<uint64_t> words_;
  std::span<std::byte> heap_;
};

/// A transport over regions that this process can address. Derived classes say who is gone. It is used by one thread at
/// a time.
class HostTransport : public Transport {
 public:
  int rank() const override { return rank_; }
  int num_ranks() const override { return static_cast<int>(regions_.size()); }
  std::span<std::byte> heap() override { return region(rank_).heap(); }
  void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
           const RowExtent& extent) override;
  bool copies_in_put() const override { return true; }
  void signal(int peer, int64_t word, uint64_t value) override;
  uint64_t load(int64_t word) const override { return region(rank_).word(word).load(std::memory_order_acquire); }
  void publish(int64_t word, uint64_t value) override;
  uint64_t peek(int peer, int64_t word) const override {
    return region(peer).word(word).load(std::memory_order_seq_cst);
  }
  void check_peer(int peer) const override { static_cast<void>(region(peer)); }
  /// Does nothing, because a put is over when `put` returns, and every later signal or publish is a release.
  void quiet() override {}
  std::optional<Departure> departed() const override;
  std::optional<Departure> departed(int peer) const override;

 protected:
  /// Takes one region for each rank.
  HostTransport(int rank, std::vector<Region> regions);

  /// The region of a rank, after checking that there is one and that this is the process that made the transport.
  const Region& region(int peer) const {
    if (peer < 0 || peer >= num_ranks() || !in_home_process()) [[unlikely]]
      refuse(peer);
    return regions_[static_cast<size_t>(peer)];
  }
  bool in_home_process() const { return generation_ == fork_generation(); }
  /// Copies rows of this rank into a heap.
  virtual void copy(const RowView& to, const RowView& from, const RowExtent& n) { copy_rows(to, from, n); }
  /// Tells all others that this rank leaves. Does nothing in a forked child.
  void leave(RankState state) noexcept;
  /// Asks anew who is gone, if that must be asked.
  virtual void refresh_states() const {}
  /// The state of a peer as far as this rank knows it.
  virtual RankState state_of(int peer) const { return region(peer).state(); }

  uint32_t doorbell() const override { return region(rank_).doorbell(); }
  void doze(uint32_t seen, std::chrono::microseconds at_most) const override { region(rank_).sleep(seen, at_most); }

 private:
  [[noreturn]] void refuse(int peer) const;
  std::optional<Departure> departure_of(int peer) const;

  int rank_;
  std::vector<Region> regions_;
  uint32_t generation_;
};

}  // namespace distca::transport
