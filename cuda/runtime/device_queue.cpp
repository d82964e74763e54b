#include "runtime/device_queue.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "runtime/mark.h"
#include "runtime/table_pool.h"

namespace distca::cuda {
namespace {

using transport::Table;
using transport::TablePart;
using transport::Tape;

struct Event {
  cudaEvent_t event = nullptr;

  Event() { check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event"); }
  Event(const Event&) = delete;
  ~Event() { cudaEventDestroy(event); }
};

/// Orders what comes later on `later` after what is on `earlier` so far.
void order(cudaStream_t earlier, cudaStream_t later, const Event& by) {
  check(cudaEventRecord(by.event, earlier), "a point of a stream");
  check(cudaStreamWaitEvent(later, by.event, 0), "a wait for another stream");
}

}  // namespace

/// The device's part of a tape. Each of its tables lies twice: in page-locked memory, where the host fills it, and on
/// the device. A stream of its own copies all tables at the start of each replay. Therefore the host may fill them
/// again while the rest of the replay goes on.
class DeviceQueue::CudaTape final : public transport::TapeDevice {
 public:
  CudaTape(std::chrono::milliseconds timeout, std::shared_ptr<bool> was_refilled)
      : timeout_(timeout), was_refilled_(std::move(was_refilled)) {
    check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "a stream for tables");
    check(cudaHostAlloc(reinterpret_cast<void**>(&turns_), sizeof(Turns), cudaHostAllocPortable | cudaHostAllocMapped),
          "page-locked memory");
    *turns_ = {};
  }
  ~CudaTape() override {
    cudaFreeHost(turns_);
    cudaStreamDestroy(copies_);
  }

  transport::TableMemory allocate(size_t bytes) override {
    const TablePool::Block block = memory_.take(bytes);
    return {{std::shared_ptr<std::byte>(), block.host}, block.device};
  }
  void await_readers() override {
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    const auto read = [&] { return std::atomic_ref(turns_->read).load(std::memory_order_acquire); };
    while (read() != turns_->committed) {
      require(
          std::chrono::steady_clock::now() < deadline, "replan: ", static_cast<double>(timeout_.count()) / 1000.0,
          " s after the replan before this one nobody has read its tables; launch the graph once after each replan");
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    require(
        std::atomic_ref(turns_->repeats).load(std::memory_order_acquire) == 0,
        "replan: the graph was launched more often than it was replanned. A launch without a replan of its own moves ",
        "old rows, perhaps over those of another step; make a new context, and launch the graph once after each ",
        "replan");
  }
  void commit() override {
    std::atomic_ref(turns_->committed).fetch_add(1, std::memory_order_release);
    *was_refilled_ = true;
  }

  /// Begins a replay, after all work so far.
  void fork(cudaStream_t work, cudaStream_t transfer) {
    is_recorded_ = {};
    check(cudaEventRecord(begun_.event, work), "a point of a stream");
    for (const cudaStream_t stream : {transfer, copies_})
      check(cudaStreamWaitEvent(stream, begun_.event, 0), "a wait for another stream");
  }
  /// Ends a replay: all tables have been copied, and later work comes after all of the replay.
  void join(cudaStream_t work, cudaStream_t transfer) {
    mark(&turns_->committed, &turns_->read, &turns_->repeats, copies_);
    order(copies_, work, copied_);
    order(transfer, work, sent_);
  }
  /// A table as it is on the device for what is queued on that stream next.
  DeviceTable load(const Table& table, const Event& loaded, cudaStream_t stream) const {
    check(cudaMemcpyAsync(table.device(), table.host(), table.layout().bytes(), cudaMemcpyHostToDevice, copies_),
          "copying a table to the device");
    order(copies_, stream, loaded);
    return {&table.layout(), table.device()};
  }
  void record(int point, cudaStream_t stream) {
    is_recorded_[static_cast<size_t>(point)] = true;
    check(cudaEventRecord(points_[static_cast<size_t>(point)].event, stream), "a point of a stream");
  }
  /// Waits for a point of this replay. A point from before the replay needs no wait: the replay comes after it
  /// (StreamOrder::join).
  void wait_for(cudaStream_t stream, int point) const {
    if (!is_recorded_[static_cast<size_t>(point)]) return;
    check(cudaStreamWaitEvent(stream, points_[static_cast<size_t>(point)].event, 0), "a wait for another stream");
  }

 private:
  /// How often tables were filled, up to which of these times the device has read them, and how many launches had no
  /// replan of their own.
  struct Turns {
    uint64_t committed = 0, read = 0, repeats = 0;
  };
  std::chrono::milliseconds timeout_;
  std::shared_ptr<bool> was_refilled_;
  cudaStream_t copies_ = nullptr;
  Turns* turns_ = nullptr;
  TablePool memory_;
  Event begun_, copied_, sent_;
  std::array<Event, transport::Streams::kNumPoints> points_;
  std::array<bool, transport::Streams::kNumPoints> is_recorded_ = {};
};

DeviceQueue::DeviceQueue(int device, runtime::CurrentStream current_stream, std::chrono::milliseconds timeout)
    : device_(device), current_stream_(current_stream), timeout_(timeout) {
  const DeviceGuard guard(device_);
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "priorities of streams");
  // The stream has the highest priority: rows leave before other work of the device goes on.
  check(cudaStreamCreateWithPriority(&transfer_, cudaStreamNonBlocking, highest), "the stream of the transport");
  for (cudaEvent_t& point : points_)
    check(cudaEventCreateWithFlags(&point, cudaEventDisableTiming), "an event of the transport");
  tables_.reserve();
}

DeviceQueue::~DeviceQueue() {
  drain();
  for (cudaEvent_t point : points_) cudaEventDestroy(point);
  cudaStreamDestroy(transfer_);
}

void DeviceQueue::drain() noexcept {
  try {
    const DeviceGuard guard(device_);
    cudaDeviceSynchronize();
  } catch (const Error&) {
    // The device is gone, and with it all that was queued.
  }
  forget_error();
}

bool DeviceQueue::has_table(std::span<const TablePart> parts) {
  return std::any_of(parts.begin(), parts.end(), [](const TablePart& p) { return p.kind != TablePart::Kind::kFixed; });
}

void DeviceQueue::join(Stream which, const char* operation, std::span<const TablePart> parts, Launch launch) {
  if (tape_->is_complete()) {
    tape_->add(operation, parts, nullptr);
    return;
  }
  const bool reads = has_table(parts);
  const std::shared_ptr<Event> loaded = [&] {
    const OutsideOfCapture outside;
    return reads ? std::make_shared<Event>() : nullptr;
  }();
  // The CudaTape has the tables of the tape, and the tape has the CudaTape. Therefore the tape's operations must not
  // keep the CudaTape alive.
  CudaTape* const cuda_tape = cuda_tape_.get();
  add(operation, parts, [=, this, launch = std::move(launch)](const std::shared_ptr<const Table>& table) {
    const DeviceGuard guard(device_);
    const cudaStream_t on = stream(which);
    launch(reads ? cuda_tape->load(*table, *loaded, on) : DeviceTable{}, on);
  });
}

void DeviceQueue::add(const char* operation, std::span<const TablePart> parts, const Tape::Start& start) {
  const auto table = tape_->add(operation, parts, start);
  if (is_capturing_) start(table);
}

void DeviceQueue::record(int point, Stream which) {
  const DeviceGuard guard(device_);
  if (!tape_) {
    check(cudaEventRecord(points_[static_cast<size_t>(point)], stream(which)), "a point of a stream");
    return;
  }
  CudaTape* const cuda_tape = cuda_tape_.get();
  add("point", {}, [=, this](const auto&) { cuda_tape->record(point, stream(which)); });
}

void DeviceQueue::wait_for(Stream which, int point) {
  const DeviceGuard guard(device_);
  if (!tape_) {
    // Since the last wait a replay, perhaps of a graph, has passed points of its own. All points are therefore set
    // behind all work so far.
    if (std::exchange(*was_refilled_, false))
      for (cudaEvent_t event : points_) check(cudaEventRecord(event, stream(Stream::kWork)), "a point of a stream");
    check(cudaStreamWaitEvent(stream(which), points_[static_cast<size_t>(point)], 0), "a wait for another stream");
    return;
  }
  CudaTape* const cuda_tape = cuda_tape_.get();
  add("wait for a point", {}, [=, this](const auto&) { cuda_tape->wait_for(stream(which), point); });
}

bool DeviceQueue::is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  check(cudaStreamIsCapturing(stream, &status), "asking whether a graph is captured");
  return status != cudaStreamCaptureStatusNone;
}

void DeviceQueue::set_tape(std::shared_ptr<Tape> tape) {
  const DeviceGuard guard(device_);
  const cudaStream_t work = stream(Stream::kWork);
  if (is_capturing_) {
    is_capturing_ = false;
    try {
      cuda_tape_->join(work, transfer_);
    } catch (const Error&) {
      // The capture has failed, and whoever ends it is told so.
    }
  }
  tape_ = std::move(tape);
  cuda_tape_ = nullptr;
  if (!tape_ || tape_->is_complete()) return;
  {
    const OutsideOfCapture outside;
    cuda_tape_ = std::make_shared<CudaTape>(timeout_, was_refilled_);
  }
  tape_->set_device(cuda_tape_);
  if (!is_captured()) return;
  is_capturing_ = true;
  tape_->set_captured();
  cuda_tape_->fork(work, transfer_);
}

void DeviceQueue::replay(const Tape& tape) {
  const DeviceGuard guard(device_);
  auto& cuda_tape = static_cast<CudaTape&>(*tape.device());
  const cudaStream_t work = stream(Stream::kWork);
  cuda_tape.fork(work, transfer_);
  tape.replay();
  cuda_tape.join(work, transfer_);
}

}  // namespace distca::cuda
