// libdistca_cuda lies beside this library and is loaded when it is first asked for. A build without nvcc lacks it. A
// machine without a GPU or a driver loads it and finds no device.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "common/error.h"
#include "runtime/backend.h"
#include "transport/streams.h"

namespace distca::runtime {

/// Returns PyTorch's current stream (a cudaStream_t) on a device in the calling thread.
using CurrentStream = void* (*)(int device);

/// The functions that the library offers.
struct CudaLibrary {
  struct Devices {
    int count = 0;
    std::string problem;  // why there is none
  };
  /// The GPUs that this process may use.
  Devices (*devices)();
  /// The compute capability of a device, as 10 * major + minor.
  int (*capability)(int device);
  /// Says why the library's own kernels do not compute attention over such heads on that device. Empty if they do.
  std::string (*own_attention_problem)(const HeadShape& heads, int device);
  /// Whether these kernels compute on that device where nobody chooses. On the others they have not run yet.
  bool (*is_own_the_default)(int device);
  /// Makes the backend of a rank on that device, on top of the one that uses ATen's operators. ATen also computes
  /// attention unless `own_attention`. The backend queues its work on `streams`, which come from make_streams; they may
  /// be null.
  std::shared_ptr<Backend> (*make_backend)(std::shared_ptr<Backend> aten, int device, CurrentStream current_stream,
                                           bool own_attention, const std::shared_ptr<transport::Streams>& streams);
  /// Makes the streams of a rank on that device. `put_blocks` thread blocks carry out a put; 0 means as many as keep a
  /// link busy.
  std::shared_ptr<transport::Streams> (*make_streams)(int device, CurrentStream current_stream,
                                                      std::chrono::milliseconds timeout, int put_blocks);
};

/// The library of this process, or null if it is missing or does not load.
DISTCA_EXPORT const CudaLibrary* cuda_library();
/// Says why there is no library. Empty if there is one.
DISTCA_EXPORT const std::string& cuda_library_problem();

/// The name of the function by which the library hands itself over. It exports no other name.
inline constexpr const char* kCudaLibraryEntry = "distca_cuda_library";

}  // namespace distca::runtime
