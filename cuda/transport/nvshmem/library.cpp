// The functions that libdistca_nvshmem offers to libdistca.
#include <nvshmem_host.h>
#include <nvshmemx.h>

#include <cstring>

#include "common/error.h"
#include "transport/nvshmem.h"
#include "transport/nvshmem/connect.h"
#include "transport/nvshmem/world.h"

namespace distca::cuda {
namespace {

/// The version of the host's library that is loaded.
struct Version {
  int major = 0, minor = 0, patch = 0;
};
Version loaded_version() {
  Version v;
  nvshmemx_vendor_get_version_info(&v.major, &v.minor, &v.patch);
  return v;
}

std::string version() {
  const Version v = loaded_version();
  return message(v.major, ".", v.minor, ".", v.patch);
}

/// NVSHMEM itself lets an older device library run under a newer host library. But since 3.5.19 the host keeps its
/// queue pairs in another order, and by IBGDA an older device library then takes those of another PE.
std::string version_problem() {
  const Version v = loaded_version();
  if (v.major == NVSHMEM_VENDOR_MAJOR_VERSION && v.minor == NVSHMEM_VENDOR_MINOR_VERSION) return "";
  return message("distca was built with NVSHMEM ", NVSHMEM_VENDOR_MAJOR_VERSION, ".", NVSHMEM_VENDOR_MINOR_VERSION, ".",
                 NVSHMEM_VENDOR_PATCH_VERSION, ", and ", version(),
                 " is loaded; the first two numbers must be the same. ", "Build distca where nvidia-nvshmem-cu13 ",
                 version(), " is installed");
}

transport::NvshmemId unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  require<DeviceError>(nvshmemx_get_uniqueid(&id) == 0, "NVSHMEM makes no unique id: it finds no network interface");
  transport::NvshmemId bytes;
  static_assert(sizeof(bytes) == sizeof(id));
  std::memcpy(bytes.data(), &id, sizeof(id));
  return bytes;
}

}  // namespace

extern "C" DISTCA_EXPORT const transport::NvshmemLibrary* distca_nvshmem_library() {
  static constexpr transport::NvshmemLibrary library{&version,         &version_problem, &unique_id,
                                                     &joining_problem, &join_world,      &connect_nvshmem};
  return &library;
}

}  // namespace distca::cuda
