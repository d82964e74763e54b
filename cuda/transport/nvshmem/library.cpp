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

std::string version() {
  int major = 0, minor = 0, patch = 0;
  nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  return message(major, ".", minor, ".", patch);
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
  static constexpr transport::NvshmemLibrary library{&version, &unique_id, &joining_problem, &join_world,
                                                     &connect_nvshmem};
  return &library;
}

}  // namespace distca::cuda
