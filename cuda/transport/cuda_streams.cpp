#include "transport/cuda_streams.h"

#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "runtime/capability.h"
#include "runtime/mark.h"
#include "transport/put.h"

namespace distca::cuda {
namespace {

using transport::StreamFault;
using transport::Streams;
using transport::table_part;

/// Words that the host and the kernels exchange, in page-locked memory.
struct News {
  uint32_t told_to_stop;
  StreamFault fault;
};

/// Lets go of another process's memory, which a device has opened.
void close_shared(int device, std::byte* memory) noexcept {
  try {
    const DeviceGuard guard(device);
    cudaIpcCloseMemHandle(memory);
  } catch (const Error&) {
    // The device is gone.
  }
  forget_error();
}

int blocks_that_keep_a_link_busy(int device) {
  const auto [major, minor] = capability_of(device);
  return blocks_of_puts(major, minor);
}

class CudaStreams final : public Streams {
 public:
  CudaStreams(int device, runtime::CurrentStream current_stream, std::chrono::milliseconds timeout, int put_blocks)
      : device_(device),
        put_blocks_(put_blocks > 0 ? put_blocks : blocks_that_keep_a_link_busy(device)),
        queue_(std::make_shared<DeviceQueue>(device, current_stream, timeout)) {
    const DeviceGuard guard(device_);
    load_put_kernels();
    load_mark_kernel();
    check(cudaHostAlloc(reinterpret_cast<void**>(&news_), sizeof(News), cudaHostAllocPortable | cudaHostAllocMapped),
          "page-locked memory");
    std::memset(static_cast<void*>(news_), 0, sizeof(News));
    check(cudaMalloc(reinterpret_cast<void**>(&stopped_), sizeof(uint32_t)), "a flag on the device");
    check(cudaMemset(stopped_, 0, sizeof(uint32_t)), "a flag on the device");
    check(cudaDeviceSynchronize(), "a flag on the device");  // before any stream reads it
    guard_ = {stopped_, &news_->told_to_stop, &news_->fault,
              static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count())};
  }
  ~CudaStreams() override {
    drain();
    cudaFree(stopped_);
    cudaFreeHost(news_);
  }

  const std::shared_ptr<DeviceQueue>& queue() const { return queue_; }
  int put_blocks() const { return put_blocks_; }

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
    cudaIpcMemHandle_t of_cuda;
    static_assert(sizeof(of_cuda) == sizeof(IpcHandle));
    check(cudaIpcGetMemHandle(&of_cuda, shared.memory.get()), "sharing memory of the GPU with other processes");
    std::memcpy(shared.handle.data(), &of_cuda, sizeof(of_cuda));
    return shared;
  }
  std::shared_ptr<std::byte> open(const IpcHandle& handle, int64_t /*bytes*/) override {
    const DeviceGuard guard(device_);
    cudaIpcMemHandle_t of_cuda;
    std::memcpy(&of_cuda, handle.data(), sizeof(of_cuda));
    void* data = nullptr;
    check(cudaIpcOpenMemHandle(&data, of_cuda, cudaIpcMemLazyEnablePeerAccess),
          "reaching the memory of another process's GPU");
    return {static_cast<std::byte*>(data), [device = device_](std::byte* p) { close_shared(device, p); }};
  }

  void record(int point, Stream which) override { queue_->record(point, which); }
  void wait_for(Stream which, int point) override { queue_->wait_for(which, point); }
  void join_host() override {}
  void drain() noexcept override { queue_->drain(); }

  void put(const transport::PutTable& table) override {
    queue_->run(Stream::kTransfer, "put", put_parts_.of(table),
                [guard = guard_, blocks = put_blocks_](const DeviceTable& t, cudaStream_t stream) {
                  put_rows(t, guard, blocks, stream);
                });
  }
  void signal(std::span<const transport::SignalTo> signals) override {
    queue_->run(Stream::kTransfer, "signal", std::array{table_part("signals", signals)},
                [guard = guard_](const DeviceTable& t, cudaStream_t stream) { write_signals(t, guard, stream); });
  }
  void send(const transport::SendTable& table, const std::shared_ptr<transport::Sender>& sender) override {
    const std::array parts = {table_part("messages", table.messages()), table_part("pieces", table.pieces())};
    queue_->run(Stream::kTransfer, "send", parts, [guard = guard_, sender](const DeviceTable& t, cudaStream_t stream) {
      sender->send(
          {t.counts(), t.part<const transport::SendMessage>(0), t.part<const transport::SendPiece>(1), t.capacity(0)},
          guard, stream);
    });
  }
  void quiet(const std::shared_ptr<transport::Sender>& sender) override {
    queue_->run(Stream::kTransfer, "quiet", {},
                [sender](const DeviceTable&, cudaStream_t stream) { sender->quiet(stream); });
  }
  void await(std::span<const transport::AwaitedMessage> awaited) override {
    queue_->run(Stream::kWork, "wait", std::array{table_part("messages", awaited)},
                [guard = guard_](const DeviceTable& t, cudaStream_t stream) { await_messages(t, guard, stream); });
  }
  void fill_nan_if_stopped(const RowView& rows, const RowExtent& n) override {
    struct Arguments {
      RowView rows;
      RowExtent n;
    };
    const Arguments arguments = {rows, n};
    queue_->run(Stream::kWork, "fill", std::array{transport::fixed_value("rows", arguments)},
                [=, guard = guard_](const DeviceTable&, cudaStream_t stream) {
                  cuda::fill_nan_if_stopped(rows, n, guard, stream);
                });
  }

  bool is_captured() const override { return queue_->is_captured(); }
  void set_tape(std::shared_ptr<transport::Tape> tape) override { queue_->set_tape(std::move(tape)); }
  void replay(const transport::Tape& tape) override { queue_->replay(tape); }

  std::optional<StreamFault> fault() const override {
    if (std::atomic_ref(news_->fault.is_set).load(std::memory_order_acquire) == 0) return std::nullopt;
    return news_->fault;
  }
  void stop() noexcept override { std::atomic_ref(news_->told_to_stop).store(1, std::memory_order_release); }

 private:
  int device_;
  int put_blocks_;
  std::shared_ptr<DeviceQueue> queue_;
  News* news_ = nullptr;
  uint32_t* stopped_ = nullptr;
  Guard guard_;
  PutParts put_parts_;
};

}  // namespace

std::shared_ptr<Streams> make_cuda_streams(int device, runtime::CurrentStream current_stream,
                                           std::chrono::milliseconds timeout, int put_blocks) {
  return std::make_shared<CudaStreams>(device, current_stream, timeout, put_blocks);
}

std::shared_ptr<DeviceQueue> queue_of(const std::shared_ptr<Streams>& streams) {
  const auto* const mine = dynamic_cast<const CudaStreams*>(streams.get());
  return mine == nullptr ? nullptr : mine->queue();
}

int sms_of_puts(const std::shared_ptr<Streams>& streams) {
  const auto* const mine = dynamic_cast<const CudaStreams*>(streams.get());
  return mine == nullptr ? 0 : sms_of_puts(mine->put_blocks());
}

}  // namespace distca::cuda
