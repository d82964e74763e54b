// What the operators must know of a GPU. The driver and PyTorch's CUDA part, which PyTorch has loaded, are asked for
// it. This library links neither; therefore it loads where they are missing.
#pragma once

#include <cstdint>

namespace distca::ops {

/// The compute capability, 10 * major + minor, of the device with PyTorch's number `device`. Throws DeviceError where
/// the driver does not say it.
int gpu_capability(int32_t device);
/// Whether PyTorch's current stream on the device is captured into a graph.
bool gpu_is_capturing(int device);
/// The stream, a cudaStream_t, that PyTorch has current on the device in the calling thread.
void* gpu_stream(int device);

}  // namespace distca::ops
