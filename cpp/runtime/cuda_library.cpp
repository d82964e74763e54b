#include "runtime/cuda_library.h"

#include "common/optional_library.h"

namespace distca::runtime {
namespace {

const OptionalLibrary<CudaLibrary>& loaded() {
  static const auto* const library =
      new OptionalLibrary(load_optional_library<CudaLibrary>("libdistca_cuda.so", kCudaLibraryEntry));
  return *library;
}

}  // namespace

const CudaLibrary* cuda_library() { return loaded().offer; }
const std::string& cuda_library_problem() { return loaded().problem; }

}  // namespace distca::runtime
