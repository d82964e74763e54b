// The calling thread's current device.
#pragma once

#include "runtime/check.h"

namespace distca::cuda {

/// Makes a device the calling thread's current one, and then again the one it was.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "the current device");
    if (device != before_) check(cudaSetDevice(device), "another device");
  }
  ~DeviceGuard() { static_cast<void>(cudaSetDevice(before_)); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

}  // namespace distca::cuda
