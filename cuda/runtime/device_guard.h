// The calling thread's current device.
#pragma once

#include "runtime/check.h"

namespace distca::cuda {

/// Makes a device the calling thread's current one, until the guard goes; then the device before is current again.
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
