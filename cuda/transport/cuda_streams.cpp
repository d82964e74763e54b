#include "transport/cuda_streams.h"

#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "runtime/device_guard.h"
#include "transport/put.h"
#include "transport/table_ring.h"

namespace distca::cuda {
namespace {

using transport::StreamFault;
using transport::Streams;

/// What the host and the kernels tell each other, in page-locked memory.
struct News {
  uint32_t told_to_stop;
  StreamFault fault;
};

template <class T>
std::span<const std::byte> bytes_of(std::span<const T> values) {
  return std::as_bytes(values);
}

class CudaStreams final : public Streams {
 public:
  CudaStreams(int device, runtime::CurrentStream current_stream, std::chrono::milliseconds timeout, int put_blocks)
      : device_(device), current_stream_(current_stream), put_blocks_(put_blocks) {
    const DeviceGuard guard(device_);
    int lowest = 0, highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "priorities of streams");
    // Rows leave before the work that waits for the device goes on.
    check(cudaStreamCreateWithPriority(&transfer_, cudaStreamNonBlocking, highest), "the stream of the transport");
    for (cudaEvent_t& point : points_)
      check(cudaEventCreateWithFlags(&point, cudaEventDisableTiming), "an event of the transport");
    check(cudaHostAlloc(reinterpret_cast<void**>(&news_), sizeof(News), cudaHostAllocPortable | cudaHostAllocMapped),
          "page-locked memory");
    std::memset(static_cast<void*>(news_), 0, sizeof(News));
    check(cudaMalloc(reinterpret_cast<void**>(&stopped_), sizeof(uint32_t)), "a flag on the device");
    check(cudaMemset(stopped_, 0, sizeof(uint32_t)), "a flag on the device");
    guard_ = {stopped_, &news_->told_to_stop, &news_->fault,
              static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count())};
  }
  ~CudaStreams() override {
    drain();
    cudaFree(stopped_);
    cudaFreeHost(news_);
    for (cudaEvent_t point : points_) cudaEventDestroy(point);
    cudaStreamDestroy(transfer_);
  }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override {
    const DeviceGuard guard(device_);
    std::byte* data = nullptr;
    check(cudaMalloc(reinterpret_cast<void**>(&data), static_cast<size_t>(bytes)), "memory for a rank's heap");
    std::shared_ptr<std::byte> owner(data, [](std::byte* p) { cudaFree(p); });
    check(cudaMemset(data, 0, static_cast<size_t>(bytes)), "clearing a rank's heap");
    check(cudaDeviceSynchronize(), "clearing a rank's heap");
    return owner;
  }
  Shared allocate_shared(int64_t bytes) override {
    Shared shared{allocate(bytes), {}};
    const DeviceGuard guard(device_);
    cudaIpcMemHandle_t handle;
    static_assert(sizeof(handle) == sizeof(Card));
    check(cudaIpcGetMemHandle(&handle, shared.memory.get()), "sharing memory of the GPU with other processes");
    std::memcpy(shared.card.data(), &handle, sizeof(handle));
    return shared;
  }
  std::shared_ptr<std::byte> open(const Card& card, int64_t /*bytes*/) override {
    const DeviceGuard guard(device_);
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, card.data(), sizeof(handle));
    void* data = nullptr;
    check(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess),
          "reaching the memory of another process's GPU");
    return {static_cast<std::byte*>(data), [](std::byte* p) { cudaIpcCloseMemHandle(p); }};
  }

  void record(int point, Stream which) override {
    const DeviceGuard guard(device_);
    check(cudaEventRecord(points_[static_cast<size_t>(point)], stream(which)), "a point of a stream");
  }
  void wait_for(Stream which, int point) override {
    const DeviceGuard guard(device_);
    check(cudaStreamWaitEvent(stream(which), points_[static_cast<size_t>(point)], 0), "a wait for another stream");
  }
  void hand_over() override {}
  void drain() noexcept override {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device_);
    cudaDeviceSynchronize();
    cudaSetDevice(before);
  }

  void put(const transport::PutTable& table) override {
    const DeviceGuard guard(device_);
    zeros_.resize(table.messages().size(), 0);
    const auto [entries, messages, counters] =
        tables_.upload<3>({bytes_of(table.entries()), bytes_of(table.messages()),
                           bytes_of(std::span<const uint32_t>(zeros_).first(table.messages().size()))},
                          transfer_);
    const DevicePutTable on_device{reinterpret_cast<const PutEntry*>(entries),
                                   reinterpret_cast<const PutMessage*>(messages), reinterpret_cast<uint32_t*>(counters),
                                   static_cast<int32_t>(table.entries().size()), table.num_chunks()};
    const int32_t blocks = put_blocks_ > 0
                               ? std::min(put_blocks_, table.num_chunks())
                               : transport::blocks_for(link_, table.num_chunks(), bytes_under_way_of_a_block());
    put_rows(on_device, guard_, blocks, transfer_);
    tables_.done(transfer_);
  }
  void signal(std::span<const transport::SignalTo> signals) override {
    const DeviceGuard guard(device_);
    const auto [list] = tables_.upload<1>({bytes_of(signals)}, transfer_);
    write_signals(reinterpret_cast<const SignalTo*>(list), static_cast<int32_t>(signals.size()), guard_, transfer_);
    tables_.done(transfer_);
  }
  void await(std::span<const transport::AwaitedMessage> awaited) override {
    const DeviceGuard guard(device_);
    const cudaStream_t work = stream(Stream::kWork);
    const auto [list] = tables_.upload<1>({bytes_of(awaited)}, work);
    await_messages(reinterpret_cast<const AwaitedMessage*>(list), static_cast<int32_t>(awaited.size()), guard_, work);
    tables_.done(work);
  }
  void fill_nan_if_stopped(const RowView& rows, const RowExtent& n) override {
    const DeviceGuard guard(device_);
    cuda::fill_nan_if_stopped(rows, n, guard_, stream(Stream::kWork));
  }

  void set_tape(std::shared_ptr<transport::Tape> tape) override {
    require(tape == nullptr, "steps on a GPU cannot be recorded yet, only those queued on threads that stand for one");
  }
  void replay(const transport::Tape&) override {}

  std::optional<StreamFault> fault() const override {
    if (std::atomic_ref(news_->fault.is_set).load(std::memory_order_acquire) == 0) return std::nullopt;
    return news_->fault;
  }
  void stop() noexcept override { std::atomic_ref(news_->told_to_stop).store(1, std::memory_order_release); }

 private:
  cudaStream_t stream(Stream which) const {
    return which == Stream::kTransfer ? transfer_ : static_cast<cudaStream_t>(current_stream_(device_));
  }

  int device_;
  runtime::CurrentStream current_stream_;
  int put_blocks_;
  transport::LinkModel link_;
  cudaStream_t transfer_ = nullptr;
  std::array<cudaEvent_t, kNumPoints> points_ = {};
  News* news_ = nullptr;
  uint32_t* stopped_ = nullptr;
  Guard guard_;
  TableRing tables_;
  std::vector<uint32_t> zeros_;
};

}  // namespace

std::shared_ptr<Streams> make_cuda_streams(int device, runtime::CurrentStream current_stream,
                                           std::chrono::milliseconds timeout, int put_blocks) {
  return std::make_shared<CudaStreams>(device, current_stream, timeout, put_blocks);
}

}  // namespace distca::cuda
