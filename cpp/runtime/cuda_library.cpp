#include "runtime/cuda_library.h"

#include <dlfcn.h>

namespace distca::runtime {
namespace {

struct Loaded {
  const CudaLibrary* library = nullptr;
  std::string problem;
};

Loaded load() {
  // Found by the RUNPATH of this library, which is its own folder. Never unloaded: contexts use it until the end.
  void* const handle = dlopen("libdistca_cuda.so", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return {nullptr, dlerror()};
  const auto entry = reinterpret_cast<const CudaLibrary* (*)()>(dlsym(handle, kCudaLibraryEntry));
  if (entry == nullptr) return {nullptr, dlerror()};
  return {entry(), {}};
}

const Loaded& loaded() {
  static const auto* const instance = new Loaded(load());
  return *instance;
}

}  // namespace

const CudaLibrary* cuda_library() { return loaded().library; }
const std::string& cuda_library_problem() { return loaded().problem; }

}  // namespace distca::runtime
