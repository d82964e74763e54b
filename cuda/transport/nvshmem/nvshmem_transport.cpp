#include "transport/nvshmem/nvshmem_transport.h"

#include <cuda_runtime_api.h>
#include <nvshmem_host.h>
#include <nvshmemx.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/check.h"
#include "runtime/table_ring.h"
#include "transport/host_memory.h"
#include "transport/nvshmem/send.h"
#include "transport/nvshmem/world.h"
#include "transport/put.h"
#include "transport/stream_transport.h"

namespace distca::cuda {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kSendArenaBytes = int64_t{256} << 20;
constexpr std::chrono::microseconds kPoll{20};
constexpr std::chrono::seconds kConnecting{120};

int64_t whole_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

/// Memory of the device, freed with its owner.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(DeviceArray&&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  /// Room for at least `count`; what was there is lost.
  void reserve(size_t count) {
    if (count <= count_) return;
    check(cudaFree(std::exchange(data_, nullptr)), "freeing device memory");
    check(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)), "allocating device memory");
    count_ = count;
  }
  /// Pageable memory is staged before the call returns, so `values` may change afterwards.
  const T* upload(std::span<const T> values, cudaStream_t stream) {
    reserve(values.size());
    check(cudaMemcpyAsync(data_, values.data(), values.size_bytes(), cudaMemcpyHostToDevice, stream),
          "copying a table to the device");
    return data_;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

struct Peer {
  std::byte* heap = nullptr;     // null where load and store do not reach it
  uint64_t* words = nullptr;     // likewise
  bool has_unsignalled = false;  // pieces were sent to it without a signal
};

class NvshmemTransport final : public transport::Transport {
 public:
  NvshmemTransport(const transport::NvshmemGroup& group, int64_t heap_bytes, int64_t num_signals,
                   std::shared_ptr<Memory> memory)
      : group_(group), num_signals_(num_signals), memory_(std::move(memory)), sends_(kSendArenaBytes) {
    const int64_t words_bytes = whole_pages(num_signals * 8), arena_begin = whole_pages(heap_bytes);
    const std::span<std::byte> all = allocate_symmetric(words_bytes + arena_begin + kSendArenaBytes);
    words_ = reinterpret_cast<uint64_t*>(all.data());
    heap_ = all.subspan(static_cast<size_t>(words_bytes), static_cast<size_t>(heap_bytes));
    send_arena_ = heap_.data() + arena_begin;
    for (int p = 0; p < group.num_ranks; ++p)
      peers_.push_back(
          {static_cast<std::byte*>(nvshmem_ptr(heap_.data(), p)), static_cast<uint64_t*>(nvshmem_ptr(words_, p))});
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "the stream of the transport");
    check(cudaStreamCreateWithFlags(&poll_stream_, cudaStreamNonBlocking), "the stream of its waits");
    check(cudaMallocHost(reinterpret_cast<void**>(&polled_), sizeof(uint64_t)), "a word of the host's");
    flags_.reserve(1);
    check(cudaMemset(flags_.data(), 0, sizeof(uint32_t)), "clearing flags");
  }
  ~NvshmemTransport() override {
    cudaStreamSynchronize(stream_);
    cudaFreeHost(polled_);
    cudaStreamDestroy(poll_stream_);
    cudaStreamDestroy(stream_);
  }

  const char* name() const override { return "nvshmem"; }
  int rank() const override { return group_.rank; }
  int num_ranks() const override { return group_.num_ranks; }
  std::span<std::byte> heap() override { return heap_; }

  void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
           const RowExtent& extent) override {
    const Peer& p = peer_at(peer);
    transport::check_put(peer, static_cast<int64_t>(heap_.size()), heap_offset, dst_row_stride, dst_head_stride,
                         extent);
    if (extent.bytes() == 0) return;
    if (open_peer_ != peer) {
      if (open_peer_ >= 0) flush(nullptr, 0);
      open_peer_ = peer;
      table_.open({peer, 0, nullptr, 0, nullptr, 0, 0});
    }
    if (p.heap != nullptr)
      table_.add({p.heap + heap_offset, dst_row_stride, dst_head_stride}, src, extent);
    else
      table_.add(
          {send_arena_ + pack(heap_offset, dst_row_stride, dst_head_stride, extent), dst_row_stride, dst_head_stride},
          src, extent);
  }

  void signal(int peer, int64_t word, uint64_t value) override {
    Peer& p = peer_at(peer);
    uint64_t* const there = address(word);
    if (open_peer_ == peer) return flush(there, value);
    if (p.has_unsignalled) {
      nvshmemx_quiet_on_stream(stream_);
      p.has_unsignalled = false;
    }
    nvshmemx_signal_op_on_stream(there, value, NVSHMEM_SIGNAL_SET, peer, stream_);
  }

  uint64_t load(int64_t word) const override {
    check(cudaMemcpyAsync(polled_, address(word), sizeof(uint64_t), cudaMemcpyDeviceToHost, poll_stream_),
          "reading a signal");
    check(cudaStreamSynchronize(poll_stream_), "reading a signal");
    return *polled_;
  }
  // Over before it returns, and so is `peek`: the two cannot pass each other.
  void publish(int64_t word, uint64_t value) override {
    *polled_ = value;
    check(cudaMemcpyAsync(address(word), polled_, sizeof(uint64_t), cudaMemcpyHostToDevice, poll_stream_),
          "publishing a word");
    check(cudaStreamSynchronize(poll_stream_), "publishing a word");
  }
  uint64_t peek(int peer, int64_t word) const override {
    peer_at(peer);
    return nvshmem_uint64_g(address(word), peer);
  }

  void quiet() override {
    if (open_peer_ >= 0) flush(nullptr, 0);
    drain();
  }

  std::optional<transport::Departure> departed() const override { return std::nullopt; }
  std::optional<transport::Departure> departed(int /*peer*/) const override { return std::nullopt; }

 protected:
  // Nothing rings on the host when a word of the device changes, so a wait reads it again and again.
  uint32_t doorbell() const override { return 0; }
  void doze(uint32_t /*seen*/, std::chrono::microseconds at_most) const override {
    std::this_thread::sleep_for(std::min(at_most, kPoll));
  }

 private:
  Peer& peer_at(int peer) const {
    require(peer >= 0 && peer < num_ranks(), "rank ", peer, " is not one of ", num_ranks(), " ranks");
    return peers_[static_cast<size_t>(peer)];
  }
  uint64_t* address(int64_t word) const {
    require(word >= 0 && word < num_signals_, "signal word ", word, " is not one of ", num_signals_);
    return words_ + word;
  }
  Guard guard() const { return {.stopped = flags_.data()}; }

  /// The offset in the send arena for rows that go to `to` in the open peer's heap. Waits where it is full.
  int64_t pack(int64_t to, int64_t row_stride, int64_t head_stride, const RowExtent& n) {
    int64_t from = sends_.add(to, row_stride, head_stride, n);
    if (from >= 0) return from;
    const int peer = open_peer_;
    flush(nullptr, 0);
    drain();
    open_peer_ = peer;
    table_.open({peer, 0, nullptr, 0, nullptr, 0, 0});
    from = sends_.add(to, row_stride, head_stride, n);
    require(from >= 0, "rows of ", n.bytes(), " bytes for rank ", peer, " do not fit into the send arena of ",
            kSendArenaBytes, " bytes");
    return from;
  }

  /// Sends what is open, then the signal unless it is null.
  void flush(uint64_t* signal, uint64_t value) {
    Peer& p = peer_at(open_peer_);
    memory_->finish();  // the rows are complete
    if (p.heap != nullptr && signal != nullptr) table_.close(p.words + (signal - words_), value);
    if (!table_.empty()) {
      put_rows(tables_.upload(parts_.of(table_), stream_), guard(), /*blocks=*/0, stream_);
      tables_.done(stream_);
    }
    if (p.heap == nullptr) {
      const std::vector<SendPiece> pieces = sends_.take();
      send({open_peer_, pieces_.upload(std::span<const SendPiece>(pieces), stream_),
            static_cast<int32_t>(pieces.size()), send_arena_, heap_.data(), signal, value},
           guard(), stream_);
      p.has_unsignalled = signal == nullptr;
    }
    table_.clear();
    open_peer_ = -1;
  }

  void drain() {
    nvshmemx_quiet_on_stream(stream_);
    check(cudaStreamSynchronize(stream_), "waiting for puts to complete");
    sends_.reset();
    for (Peer& p : peers_) p.has_unsignalled = false;
  }

  transport::NvshmemGroup group_;
  int64_t num_signals_;
  std::shared_ptr<Memory> memory_;
  uint64_t* words_ = nullptr;
  std::span<std::byte> heap_;
  std::byte* send_arena_ = nullptr;
  mutable std::vector<Peer> peers_;
  cudaStream_t stream_ = nullptr, poll_stream_ = nullptr;
  uint64_t* polled_ = nullptr;   // the host's, pinned
  DeviceArray<uint32_t> flags_;  // whether the context has stopped
  // What goes to one peer, until a signal follows it.
  int open_peer_ = -1;
  transport::PutTable table_;
  SendTable sends_;
  PutParts parts_;
  TableRing tables_;
  DeviceArray<SendPiece> pieces_;
};

/// Whether `mine` holds on all ranks.
bool holds_on_all(transport::Transport& control, bool mine, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (int p = 0; p < control.num_ranks(); ++p) control.signal(p, control.rank(), mine ? 2 : 1);
  bool all = true;
  for (int p = 0; p < control.num_ranks(); ++p) {
    const bool came = control.wait(p, 1, deadline, [&] {
      require<PeerDiedError>(!control.departed(p), "rank ", p, " is gone before NVSHMEM could begin");
    });
    require<PeerTimeoutError>(came, "rank ", p, " does not say which GPUs it reaches");
    all = all && control.load(p) == 2;
  }
  return all;
}

}  // namespace

std::unique_ptr<transport::Transport> connect_nvshmem(const transport::NvshmemGroup& group, int64_t heap_bytes,
                                                      int64_t num_signals, std::shared_ptr<Memory> memory,
                                                      std::unique_ptr<transport::Transport> control,
                                                      std::shared_ptr<transport::Streams> streams) {
  require(memory != nullptr, "the nvshmem transport moves rows between GPUs, and the rank's rows lie on the host");
  join_world(group);
  const auto host_driven = [&] {
    return std::make_unique<NvshmemTransport>(group, heap_bytes, num_signals, std::move(memory));
  };
  if (control == nullptr || streams == nullptr) return host_driven();
  const int64_t words_bytes = whole_pages(num_signals * 8);
  const std::span<std::byte> own = allocate_symmetric(words_bytes + whole_pages(heap_bytes));
  transport::DeviceHeaps heaps{.ranks = {}, .heap_bytes = heap_bytes, .num_words = num_signals, .owner = nullptr};
  bool reaches_all = true;
  for (int p = 0; p < group.num_ranks; ++p) {
    auto* const base = static_cast<std::byte*>(nvshmem_ptr(own.data(), p));
    reaches_all = reaches_all && base != nullptr;
    heaps.ranks.push_back({base + words_bytes, reinterpret_cast<uint64_t*>(base)});
  }
  if (!holds_on_all(*control, reaches_all, kConnecting)) return host_driven();
  return std::make_unique<transport::StreamTransport>("nvshmem", std::move(control), std::move(streams),
                                                      std::move(heaps));
}

}  // namespace distca::cuda
