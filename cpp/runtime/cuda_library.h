// libdistca_cuda: loaded from beside this library when it is first asked for, and not before. A build without nvcc
// lacks it; a machine without a GPU or a driver loads it and finds no device.
#pragma once

#include <string>

#include "common/error.h"

namespace distca::runtime {

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
};

/// Of this process; null where it is missing or does not load.
DISTCA_EXPORT const CudaLibrary* cuda_library();
/// Why there is no library; empty where there is one.
DISTCA_EXPORT const std::string& cuda_library_problem();

/// How the library hands itself over: its only exported name.
inline constexpr const char* kCudaLibraryEntry = "distca_cuda_library";

}  // namespace distca::runtime
