// Attention on the emulated GPU: kernels of heads up to 64 columns and those up to 512, on the emulated machine
// (../machine.h). Of others there are none.
#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "attention/kernels.h"
#include "device.h"
#include "machine.h"
#include "streams.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_128() { return {}; }
std::span<const HeadKernels> hopper_kernels_192() { return {}; }
std::span<const HeadKernels> hopper_kernels_256() { return {}; }
std::span<const HeadKernels> ampere_kernels_128() { return {}; }
std::span<const HeadKernels> ampere_kernels_192() { return {}; }
std::span<const HeadKernels> ampere_kernels_256() { return {}; }

}  // namespace distca::attention::cuda

namespace emulated_gpu {

std::byte* dynamic_shared() { return emulation::machine->cta().shared; }

void start_on_machine(const Launch& how, Kernel kernel) {
  check_launch(how, kernel);
  auto run = [how, thread = std::move(kernel.thread)](uint32_t seed) {
    emulation::Machine machine(seed);
    machine.run(static_cast<int>(how.grid.x), static_cast<int>(how.block.x), how.shared_bytes,
                [&](std::byte*) { thread(); });
  };
  report(queue(how.stream, {kernel.name, std::move(kernel.words), std::move(run)}));
}

}  // namespace emulated_gpu

/// The emulated hopper.h has its own idea of a map: what the map is made of.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  using distca::attention::cuda::MapSpec;
  static_assert(sizeof(MapSpec) <= sizeof(CUtensorMap));
  const auto is_wrong = [](uint64_t stride) { return stride % 16 != 0 || stride >= uint64_t{1} << 40; };
  if (rank != 3 || reinterpret_cast<uintptr_t>(map) % 64 != 0 || reinterpret_cast<uintptr_t>(data) % 16 != 0 ||
      std::any_of(strides, strides + 2, is_wrong) ||
      std::any_of(box, box + 3, [](uint32_t n) { return n == 0 || n > 256; }) ||
      std::any_of(element_strides, element_strides + 3, [](uint32_t n) { return n != 1; }))
    return CUDA_ERROR_INVALID_VALUE;
  MapSpec spec{};
  spec.data = static_cast<std::byte*>(data);
  std::copy_n(sizes, 3, spec.sizes);
  std::copy_n(strides, 2, spec.strides);
  std::copy_n(box, 3, spec.box);
  std::memcpy(static_cast<void*>(map), &spec, sizeof(spec));
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool is_known = std::string_view(symbol) == "cuTensorMapEncodeTiled";
  *function = is_known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *found = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
