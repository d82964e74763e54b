// Page-locked memory of the host and as much memory of the device, in chunks that are freed only at the end. Freeing
// either waits for the whole device, and therefore for kernels that wait for what this thread has yet to queue.
// Allocating may do the same.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "common/align.h"
#include "runtime/check.h"

namespace distca::cuda {

/// Leaves a capture of this thread for as long as the object lives. Allocations are allowed meanwhile and are no part
/// of the capture.
class OutsideOfCapture {
 public:
  OutsideOfCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "leaving a capture"); }
  ~OutsideOfCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  OutsideOfCapture(const OutsideOfCapture&) = delete;
  OutsideOfCapture& operator=(const OutsideOfCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class TablePool {
 public:
  struct Block {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
  };

  TablePool() = default;
  TablePool(const TablePool&) = delete;
  TablePool& operator=(const TablePool&) = delete;
  ~TablePool() {
    for (const Chunk& c : chunks_) {
      cudaFreeHost(c.block.host);
      cudaFree(c.block.device);
    }
  }

  /// Makes room before anything waits on the device, because allocating may wait for the device too.
  void reserve(size_t bytes) { add(bytes); }
  /// Takes memory of both kinds, aligned to 256 bytes, on the calling thread's device.
  Block take(size_t bytes) {
    bytes = round_up(bytes, kAlignment);
    if (chunks_.empty() || bytes > chunks_.back().bytes - chunks_.back().used) add(std::max(bytes, kChunk));
    Chunk& c = chunks_.back();
    const Block block = {c.block.host + c.used, c.block.device + c.used};
    c.used += bytes;
    return block;
  }

 private:
  static constexpr size_t kAlignment = 256, kChunk = size_t{2} << 20;

  struct Chunk {
    Block block;
    size_t bytes = 0, used = 0;
  };

  void add(size_t bytes) {
    const OutsideOfCapture outside;
    Chunk& c = chunks_.emplace_back();
    void *host = nullptr, *device = nullptr;
    check(cudaHostAlloc(&host, bytes, cudaHostAllocPortable), "page-locked memory for tables");
    c.block.host = static_cast<std::byte*>(host);
    check(cudaMalloc(&device, bytes), "device memory for tables");
    c.block.device = static_cast<std::byte*>(device);
    c.bytes = bytes;
  }

  std::vector<Chunk> chunks_;
};

}  // namespace distca::cuda
