// What has to be known of a GPU, asked of the driver that PyTorch has loaded: this library links neither CUDA nor
// PyTorch's part of it.
#pragma once

#include <cstdint>

namespace distca::ops {

/// Compute capability of a device by PyTorch's number, 10 * major + minor. DeviceError where the driver does not tell.
int gpu_capability(int32_t device);

}  // namespace distca::ops
