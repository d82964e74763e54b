// The calling thread's current device.
#pragma once

#include "runtime/check.h"

namespace distca::cuda {

/// Makes a device the calling thread's current one, until the guard goes; then the device before is current again.
/// Setting a device takes memory of it. Therefore a device that is current already is not set again.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "the current device");
    changes_ = device != before_;
    if (changes_) check(cudaSetDevice(device), "another device");
  }
  ~DeviceGuard() {
    if (changes_) static_cast<void>(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changes_ = false;
};

}  // namespace distca::cuda
