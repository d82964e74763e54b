#include "torch/gpu.h"

#include <dlfcn.h>

#include "common/error.h"

namespace distca::ops {
namespace {

// These are the values of cuda.h.
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;

using GetDevice = int (*)(int* device, int ordinal);
using GetAttribute = int (*)(int* value, int attribute, int device);

template <class Function>
Function driver_function(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  require<DeviceError>(driver != nullptr, "the CUDA driver, libcuda.so.1, cannot be loaded");
  const auto function = reinterpret_cast<Function>(dlsym(driver, name));
  require<DeviceError>(function != nullptr, "the CUDA driver has no ", name);
  return function;
}

}  // namespace

int gpu_capability(int32_t device) {
  static const auto get_device = driver_function<GetDevice>("cuDeviceGet");
  static const auto get_attribute = driver_function<GetAttribute>("cuDeviceGetAttribute");
  int handle = 0, major = 0, minor = 0;
  const bool known = get_device(&handle, device) == 0 && get_attribute(&major, kCapabilityMajor, handle) == 0 &&
                     get_attribute(&minor, kCapabilityMinor, handle) == 0;
  require<DeviceError>(known, "the CUDA driver does not know device ", device);
  return 10 * major + minor;
}

void* gpu_stream(int device) {
  using GetStream = int32_t (*)(int32_t device, void** stream);
  static const auto get_stream = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    require<DeviceError>(library != nullptr, "this PyTorch has no CUDA part, libtorch_cuda.so");
    const auto function = reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
    require<DeviceError>(function != nullptr, "PyTorch's libtorch_cuda.so does not tell its current stream");
    return function;
  }();
  void* stream = nullptr;
  require<DeviceError>(get_stream(device, &stream) == 0, "PyTorch has no current stream on device ", device);
  return stream;
}

bool gpu_is_capturing(int device) {
  using IsCapturing = int (*)(void* stream, int* status);
  static const auto is_capturing = driver_function<IsCapturing>("cuStreamIsCapturing");
  int status = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
  return is_capturing(gpu_stream(device), &status) == 0 && status != 0;
}

}  // namespace distca::ops
