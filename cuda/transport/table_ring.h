// Tables of kernels on their way to the device: page-locked memory and device memory that are used again once the
// kernel that read them is done.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <span>

#include "runtime/check.h"

namespace distca::cuda {

class TableRing {
 public:
  TableRing() = default;
  TableRing(const TableRing&) = delete;
  ~TableRing() {
    for (Place& p : places_) {
      if (p.used != nullptr) cudaEventDestroy(p.used);
      cudaFreeHost(p.host);
      cudaFree(p.device);
    }
  }

  /// A table's parts one after another, each aligned to 16 bytes, as they will be on the device for what is queued on
  /// that stream next. `done` has to follow.
  template <size_t kParts>
  std::array<std::byte*, kParts> upload(const std::array<std::span<const std::byte>, kParts>& parts,
                                        cudaStream_t stream) {
    std::array<size_t, kParts> offsets;
    size_t bytes = 0;
    for (size_t i = 0; i < kParts; ++i) {
      offsets[i] = bytes;
      bytes += (parts[i].size() + 15) / 16 * 16;
    }
    Place& p = next_place(bytes);
    std::array<std::byte*, kParts> on_device;
    for (size_t i = 0; i < kParts; ++i) {
      if (!parts[i].empty()) std::memcpy(p.host + offsets[i], parts[i].data(), parts[i].size());
      on_device[i] = p.device + offsets[i];
    }
    check(cudaMemcpyAsync(p.device, p.host, bytes, cudaMemcpyHostToDevice, stream), "copying a table to the device");
    return on_device;
  }
  /// What reads the table that was uploaded last has been queued.
  void done(cudaStream_t stream) { check(cudaEventRecord(places_[last_].used, stream), "an event after a kernel"); }

 private:
  struct Place {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
    size_t bytes = 0;
    cudaEvent_t used = nullptr;
  };
  /// The host may be as many launches ahead of the device.
  static constexpr size_t kPlaces = 128;

  Place& next_place(size_t bytes) {
    last_ = (last_ + 1) % kPlaces;
    Place& p = places_[last_];
    if (p.used == nullptr)
      check(cudaEventCreateWithFlags(&p.used, cudaEventDisableTiming), "an event");
    else
      check(cudaEventSynchronize(p.used), "waiting for a kernel");
    if (bytes <= p.bytes) return p;
    check(cudaFreeHost(std::exchange(p.host, nullptr)), "freeing page-locked memory");
    check(cudaFree(std::exchange(p.device, nullptr)), "freeing device memory");
    p.bytes = 0;
    const size_t room = bytes + bytes / 2;
    check(cudaHostAlloc(reinterpret_cast<void**>(&p.host), room, cudaHostAllocDefault), "page-locked memory");
    check(cudaMalloc(reinterpret_cast<void**>(&p.device), room), "device memory");
    p.bytes = room;
    return p;
  }

  std::array<Place, kPlaces> places_;
  size_t last_ = 0;
};

}  // namespace distca::cuda
