// The compute capability of a GPU.
#pragma once

#include "runtime/check.h"

namespace distca::cuda {

struct Capability {
  int major = 0, minor = 0;
};

/// Throws DeviceError if there is no such device.
inline Capability capability_of(int device) {
  Capability found;
  check(cudaDeviceGetAttribute(&found.major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
  check(cudaDeviceGetAttribute(&found.minor, cudaDevAttrComputeCapabilityMinor, device), "compute capability");
  return found;
}

}  // namespace distca::cuda
