// The functions that libdistca_cuda offers to libdistca.
#include <cuda_runtime_api.h>

#include "attention/cuda_attention.h"
#include "runtime/capability.h"
#include "runtime/check.h"
#include "runtime/cuda_library.h"
#include "runtime/device_backend.h"
#include "transport/cuda_streams.h"

namespace distca::cuda {
namespace {

runtime::CudaLibrary::Devices devices() {
  runtime::CudaLibrary::Devices found;
  const cudaError_t result = cudaGetDeviceCount(&found.count);
  if (result != cudaSuccess) {
    forget_error();
    found = {0, cudaGetErrorString(result)};
  } else if (found.count == 0) {
    found.problem = "no CUDA-capable device is visible";
  }
  return found;
}

int capability(int device) {
  const auto [major, minor] = capability_of(device);
  return 10 * major + minor;
}

std::string own_attention_problem(const HeadShape& heads, int device) {
  const int found = capability(device);
  return attention::cuda::unsupported_reason(heads, attention::cuda::family_of(found / 10, found % 10));
}

bool is_own_the_default(int device) { return capability(device) == 90; }

}  // namespace

extern "C" DISTCA_EXPORT const runtime::CudaLibrary* distca_cuda_library() {
  static constexpr runtime::CudaLibrary library{
      &devices, &capability, &own_attention_problem, &is_own_the_default, &make_device_backend, &make_cuda_streams};
  return &library;
}

}  // namespace distca::cuda
