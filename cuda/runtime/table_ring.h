// Tables of kernels on their way to the device. Their memory is used again once the kernel that read it is done.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <bit>
#include <cstddef>
#include <optional>
#include <span>

#include "runtime/check.h"
#include "runtime/device_table.h"
#include "runtime/table_pool.h"

namespace distca::cuda {

class TableRing {
 public:
  TableRing() = default;
  TableRing(const TableRing&) = delete;
  TableRing& operator=(const TableRing&) = delete;
  ~TableRing() {
    for (Place& p : places_)
      if (p.used != nullptr) cudaEventDestroy(p.used);
  }

  /// Makes room for the tables of most plans, on the calling thread's device.
  void reserve() { memory_.reserve(kReserved); }
  /// Copies a table with these parts. It is on the device for what is queued on that stream next. `done` must follow;
  /// the table is valid until then.
  DeviceTable upload(std::span<const transport::TablePart> parts, cudaStream_t stream) {
    const transport::TableLayout layout(parts);
    Place& p = next_place(layout.bytes());
    p.layout = layout;
    layout.write(parts, p.block.host);
    check(cudaMemcpyAsync(p.block.device, p.block.host, layout.bytes(), cudaMemcpyHostToDevice, stream),
          "copying a table to the device");
    return {&*p.layout, p.block.device};
  }
  /// Says that everything that reads the table uploaded last has been queued.
  void done(cudaStream_t stream) { check(cudaEventRecord(places_[last_].used, stream), "an event after a kernel"); }

 private:
  struct Place {
    TablePool::Block block;
    size_t bytes = 0;
    cudaEvent_t used = nullptr;
    std::optional<transport::TableLayout> layout;
  };
  /// The host may be this many launches ahead of the device.
  static constexpr size_t kPlaces = 128, kLeastBytes = 4096, kReserved = size_t{8} << 20;

  Place& next_place(size_t bytes) {
    last_ = (last_ + 1) % kPlaces;
    Place& p = places_[last_];
    if (p.used == nullptr)
      check(cudaEventCreateWithFlags(&p.used, cudaEventDisableTiming), "an event");
    else
      check(cudaEventSynchronize(p.used), "waiting for a kernel");
    if (bytes > p.bytes) {
      p.bytes = std::bit_ceil(std::max(bytes, kLeastBytes));
      p.block = memory_.take(p.bytes);
    }
    return p;
  }

  TablePool memory_;
  std::array<Place, kPlaces> places_;
  size_t last_ = 0;
};

}  // namespace distca::cuda
