#include "transport/nvshmem.h"

#include "common/optional_library.h"

namespace distca::transport {
namespace {

const OptionalLibrary<NvshmemLibrary>& loaded() {
  static const auto* const library =
      new OptionalLibrary(load_optional_library<NvshmemLibrary>("libdistca_nvshmem.so", kNvshmemLibraryEntry));
  return *library;
}

}  // namespace

const NvshmemLibrary* nvshmem_library() { return loaded().offer; }
const std::string& nvshmem_library_problem() { return loaded().problem; }

}  // namespace distca::transport
