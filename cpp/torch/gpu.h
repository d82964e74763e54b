// What has to be known of a GPU, asked of the driver and of PyTorch's CUDA part, which PyTorch has loaded: this library
// links neither, so that it loads where they are missing.
#pragma once

#include <cstdint>

namespace distca::ops {

/// Compute capability of a device by PyTorch's number, 10 * major + minor. DeviceError where the driver does not tell.
int gpu_capability(int32_t device);
/// The stream, a cudaStream_t, that PyTorch has current there in the calling thread.
void* gpu_stream(int device);

}  // namespace distca::ops
