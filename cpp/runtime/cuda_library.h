// libdistca_cuda: loaded from beside this library when it is first asked for, and not before. A build without nvcc
// lacks it; a machine without a GPU or a driver loads it and finds no device.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "common/error.h"
#include "runtime/backend.h"
#include "transport/streams.h"

namespace distca::runtime {

/// The stream, a cudaStream_t, that PyTorch has current on a device in the calling thread.
using CurrentStream = void* (*)(int device);

/// What the library offers.
struct CudaLibrary {
  struct Devices {
    int count = 0;
    std::string problem;  // why there is none
  };
  /// The GPUs that this process may use.
  Devices (*devices)();
  /// Compute capability of a device, 10 * major + minor.
  int (*capability)(int device);
  /// Why the library's own kernels do not compute attention over such heads on that device; empty where they do.
  std::string (*own_attention_problem)(const HeadShape& heads, int device);
  /// The backend of a rank on that device, over the one by ATen's operators, which also computes attention unless
  /// `own_attention`. `streams`: those of make_streams on which it queues its work, or null.
  std::shared_ptr<Backend> (*make_backend)(std::shared_ptr<Backend> aten, int device, CurrentStream current_stream,
                                           bool own_attention, const std::shared_ptr<transport::Streams>& streams);
  /// The streams of a rank on that device. `put_blocks` thread blocks carry out a put; 0: as many as keep a link busy.
  std::shared_ptr<transport::Streams> (*make_streams)(int device, CurrentStream current_stream,
                                                      std::chrono::milliseconds timeout, int put_blocks);
};

/// Of this process; null where it is missing or does not load.
DISTCA_EXPORT const CudaLibrary* cuda_library();
/// Why there is no library; empty where there is one.
DISTCA_EXPORT const std::string& cuda_library_problem();

/// How the library hands itself over: the only name that it exports.
inline constexpr const char* kCudaLibraryEntry = "distca_cuda_library";

}  // namespace distca::runtime
