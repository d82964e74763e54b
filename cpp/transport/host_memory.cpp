#include "transport/host_memory.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "common/align.h"

namespace distca::transport {
namespace {

constexpr int64_t kMaxHeapBytes = int64_t{1} << 46;
constexpr int64_t kMaxSignals = int64_t{1} << 32;

}  // namespace

void check_region_sizes(int64_t heap_bytes, int64_t num_signals) {
  require(heap_bytes >= 0 && heap_bytes <= kMaxHeapBytes, "a heap of ", heap_bytes,
          " bytes was asked for; allowed are 0 to ", kMaxHeapBytes);
  require(num_signals >= 0 && num_signals <= kMaxSignals, num_signals,
          " signal words were asked for; allowed are 0 to ", kMaxSignals);
}

int64_t region_bytes(int64_t heap_bytes, int64_t num_signals) {
  const int64_t words = static_cast<int64_t>(sizeof(Region::Header)) + num_signals * int64_t{sizeof(uint64_t)};
  return round_up(words, kPageBytes) + round_up(heap_bytes, kPageBytes);
}

void check_put(int peer, int64_t heap_bytes, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride,
               const RowExtent& n) {
  const auto refuse = [&] {
    throw InvalidArgumentError(message("a put to rank ", peer, " of ", n.num_rows, " rows x ", n.num_heads, " heads x ",
                                       n.head_bytes, " bytes at offset ", heap_offset, " with strides of ",
                                       dst_row_stride, " and ", dst_head_stride, " bytes leaves the heap of ",
                                       heap_bytes, " bytes"));
  };
  if (n.num_rows < 0 || n.num_heads < 0 || n.head_bytes < 0 || heap_offset < 0 || dst_row_stride < 0 ||
      dst_head_stride < 0)
    refuse();
  if (n.num_rows == 0 || n.num_heads == 0 || n.head_bytes == 0) return;
  int64_t rows = 0, heads = 0, end = 0, bytes = 0;
  if (__builtin_mul_overflow(n.num_rows - 1, dst_row_stride, &rows) ||
      __builtin_mul_overflow(n.num_heads - 1, dst_head_stride, &heads) ||
      __builtin_add_overflow(heap_offset, rows, &end) || __builtin_add_overflow(end, heads, &end) ||
      __builtin_add_overflow(end, n.head_bytes, &end) || end > heap_bytes)
    refuse();
  // Rows that overlap in the heap could have more bytes than it has.
  if (__builtin_mul_overflow(n.num_rows, n.num_heads, &bytes) || __builtin_mul_overflow(bytes, n.head_bytes, &bytes) ||
      bytes > heap_bytes)
    refuse();
}

Mapping Mapping::anonymous(int64_t bytes) { return Mapping(MAP_PRIVATE | MAP_ANONYMOUS, -1, bytes); }
Mapping Mapping::shared(int fd, int64_t bytes) { return Mapping(MAP_SHARED, fd, bytes); }

Mapping::Mapping(int flags, int fd, int64_t bytes) : bytes_(bytes) {
  watch_forks();
  generation_ = fork_generation();
  void* const p = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
  require<OperatingSystemError>(p != MAP_FAILED, "could not map ", bytes, " bytes of memory: ", std::strerror(errno));
  data_ = static_cast<std::byte*>(p);
  // Without this advice a forked worker that outlives its parent would keep the whole heap alive. A kernel that does
  // not know the advice does no harm.
  static_cast<void>(::madvise(p, static_cast<size_t>(bytes), MADV_DONTFORK));
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_), generation_(other.generation_) {}

Mapping::~Mapping() {
  // In a forked child these addresses may belong to somebody else.
  if (data_ != nullptr && generation_ == fork_generation()) ::munmap(data_, static_cast<size_t>(bytes_));
}

Region::Region(std::byte* base, int64_t heap_bytes, int64_t num_signals)
    : Region(base, num_signals, {base + region_bytes(0, num_signals), static_cast<size_t>(heap_bytes)}) {}

Region::Region(std::byte* base, int64_t num_signals, std::span<std::byte> heap)
    : header_(reinterpret_cast<Header*>(base)),
      words_(reinterpret_cast<uint64_t*>(base + sizeof(Header)), static_cast<size_t>(num_signals)),
      heap_(heap) {
  static_assert(std::atomic_ref<uint32_t>::is_always_lock_free && std::atomic_ref<uint64_t>::is_always_lock_free);
}

std::atomic_ref<uint64_t> Region::word(int64_t index) const {
  require(index >= 0 && index < static_cast<int64_t>(words_.size()), "signal word ", index,
          " does not exist; there are ", words_.size());
  return std::atomic_ref(words_[static_cast<size_t>(index)]);
}

// Both sides are sequentially consistent: either the sleeper sees the new doorbell, or this thread sees the sleeper.
void Region::ring() const {
  std::atomic_ref(header_->doorbell).fetch_add(1, std::memory_order_seq_cst);
  if (std::atomic_ref(header_->sleepers).load(std::memory_order_seq_cst) != 0)
    ::syscall(SYS_futex, &header_->doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Region::sleep(uint32_t seen, std::chrono::microseconds at_most) const {
  if (at_most.count() <= 0) return;
  const std::atomic_ref sleepers(header_->sleepers);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (std::atomic_ref(header_->doorbell).load(std::memory_order_seq_cst) == seen) {
    const auto us = at_most.count();
    const timespec timeout{.tv_sec = static_cast<time_t>(us / 1000000),
                           .tv_nsec = static_cast<long>(us % 1000000) * 1000};
    ::syscall(SYS_futex, &header_->doorbell, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  }
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

HostTransport::HostTransport(int rank, std::vector<Region> regions)
    : rank_(rank), regions_(std::move(regions)), generation_(fork_generation()) {
  require(rank >= 0 && rank < num_ranks(), "rank ", rank, " is not one of ", num_ranks(), " ranks");
}

void HostTransport::refuse(int peer) const {
  require(in_home_process(), "the ", name(), " transport of rank ", rank_,
          " was made before this process was forked; only the process that made it can use it");
  throw InvalidArgumentError(message("rank ", peer, " is not one of ", num_ranks(), " ranks"));
}

void HostTransport::put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride,
                        const RowView& src, const RowExtent& extent) {
  const std::span<std::byte> heap = region(peer).heap();
  check_put(peer, static_cast<int64_t>(heap.size()), heap_offset, dst_row_stride, dst_head_stride, extent);
  if (extent.num_rows == 0 || extent.num_heads == 0 || extent.head_bytes == 0) return;
  copy({heap.data() + heap_offset, dst_row_stride, dst_head_stride}, src, extent);
}

void HostTransport::signal(int peer, int64_t word, uint64_t value) {
  const Region& there = region(peer);
  there.word(word).store(value, std::memory_order_release);
  there.ring();
}

// This store and the load in `peek` are sequentially consistent. Therefore the two cannot pass each other.
void HostTransport::publish(int64_t word, uint64_t value) {
  const Region& here = region(rank_);
  here.word(word).store(value, std::memory_order_seq_cst);
  here.ring();
}

std::optional<Departure> HostTransport::departed() const {
  refresh_states();
  std::optional<Departure> closed;
  for (int peer = 0; peer < num_ranks(); ++peer) {
    const std::optional<Departure> gone = departure_of(peer);
    if (gone && !gone->orderly) return gone;
    if (gone && !closed) closed = gone;
  }
  return closed;
}

std::optional<Departure> HostTransport::departed(int peer) const {
  refresh_states();
  return departure_of(peer);
}

std::optional<Departure> HostTransport::departure_of(int peer) const {
  if (peer == rank_) return std::nullopt;
  const RankState state = state_of(peer);
  if (state == RankState::kPresent) return std::nullopt;
  return Departure{.peer = peer, .orderly = state == RankState::kClosed};
}

void HostTransport::leave(RankState state) noexcept {
  if (!in_home_process()) return;
  regions_[static_cast<size_t>(rank_)].set_state(state);
  for (const Region& peer : regions_) peer.ring();
}

}  // namespace distca::transport
