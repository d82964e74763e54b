#include "transport/nvshmem.h"

#include <dlfcn.h>

namespace distca::transport {
namespace {

struct Loaded {
  const NvshmemLibrary* library = nullptr;
  std::string problem;
};

Loaded load() {
  // Found by the RUNPATH of this library, which is its own folder. Never unloaded: NVSHMEM does not end.
  void* const handle = dlopen("libdistca_nvshmem.so", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return {nullptr, dlerror()};
  const auto entry = reinterpret_cast<const NvshmemLibrary* (*)()>(dlsym(handle, kNvshmemLibraryEntry));
  if (entry == nullptr) return {nullptr, dlerror()};
  return {entry(), {}};
}

const Loaded& loaded() {
  static const auto* const instance = new Loaded(load());
  return *instance;
}

}  // namespace

const NvshmemLibrary* nvshmem_library() { return loaded().library; }
const std::string& nvshmem_library_problem() { return loaded().problem; }

}  // namespace distca::transport
