// The queue of all that a rank does on a GPU: operations with their tables, on the stream of its own work and on that
// of its transport. Operations happen once, or they join a tape, whose tables are filled anew between replays.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <span>

#include "common/error.h"
#include "runtime/cuda_library.h"
#include "runtime/device_guard.h"
#include "runtime/device_table.h"
#include "runtime/table_ring.h"
#include "transport/streams.h"
#include "transport/tape.h"

namespace distca::cuda {

class DeviceQueue {
 public:
  using Stream = transport::Streams::Stream;

  /// The rank's work goes to the stream that PyTorch has current in the calling thread. `timeout` is how long a replan
  /// waits until the tables of the one before it have been read.
  DeviceQueue(int device, runtime::CurrentStream current_stream, std::chrono::milliseconds timeout);
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;

  cudaStream_t stream(Stream which) const {
    return which == Stream::kTransfer ? transfer_ : static_cast<cudaStream_t>(current_stream_(device_));
  }

  /// Queues an operation. launch(table, stream) starts its kernels, which read a table with these parts.
  template <class Launch>
  void run(Stream which, const char* operation, std::span<const transport::TablePart> parts, const Launch& launch) {
    const DeviceGuard guard(device_);
    if (tape_) return join(which, operation, parts, launch);
    const cudaStream_t on = stream(which);
    if (!has_table(parts)) return launch(DeviceTable{}, on);
    require(!is_captured(on), operation,
            " reads a table that is gone when a graph is launched; only recorded steps of ",
            "a context can be captured into a CUDA graph");
    launch(tables_.upload(parts, on), on);
    tables_.done(on);
  }

  /// These functions are as in transport::Streams.
  void record(int point, Stream which);
  void wait_for(Stream which, int point);
  void set_tape(std::shared_ptr<transport::Tape> tape);
  void replay(const transport::Tape& tape);
  void drain() noexcept;

  bool is_captured() const {
    const DeviceGuard guard(device_);
    return is_captured(stream(Stream::kWork));
  }
  bool is_recording() const { return tape_ != nullptr; }

 private:
  class CudaTape;
  using Points = std::array<cudaEvent_t, transport::Streams::kNumPoints>;
  using Launch = std::function<void(const DeviceTable& table, cudaStream_t stream)>;

  static bool has_table(std::span<const transport::TablePart> parts);
  static bool is_captured(cudaStream_t stream);
  void join(Stream which, const char* operation, std::span<const transport::TablePart> parts, Launch launch);
  /// Adds the next operation to the tape, and queues it where a graph is captured.
  void add(const char* operation, std::span<const transport::TablePart> parts, const transport::Tape::Start& start);

  int device_;
  runtime::CurrentStream current_stream_;
  std::chrono::milliseconds timeout_;
  cudaStream_t transfer_ = nullptr;
  Points points_ = {};
  TableRing tables_;

  std::shared_ptr<transport::Tape> tape_;
  std::shared_ptr<CudaTape> cuda_tape_;  // of the tape that is being recorded
  bool is_capturing_ = false;            // whether its operations are also queued, into a graph
  std::shared_ptr<bool> was_refilled_ = std::make_shared<bool>(false);  // set when tables are filled; see wait_for
};

}  // namespace distca::cuda
