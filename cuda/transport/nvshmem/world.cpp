#include "transport/nvshmem/world.h"

#include <cuda_runtime_api.h>
#include <nvshmem_host.h>
#include <nvshmemx.h>

#include <cstring>
#include <mutex>
#include <optional>

#include "runtime/check.h"

namespace distca::cuda {

using transport::NvshmemGroup;

void join_world(const NvshmemGroup& group) {
  static std::mutex mutex;
  static std::optional<NvshmemGroup> joined;
  const std::lock_guard lock(mutex);
  check(cudaSetDevice(group.device), "the device of the rank");
  if (joined) {
    require(joined->rank == group.rank && joined->num_ranks == group.num_ranks && joined->device == group.device,
            "this process is rank ", joined->rank, " of ", joined->num_ranks, " of NVSHMEM on device ", joined->device,
            "; a further context must have the same ranks and devices, not rank ", group.rank, " of ", group.num_ranks,
            " on device ", group.device);
    return;
  }
  nvshmemx_uniqueid_t id;
  static_assert(sizeof(id) == sizeof(group.unique_id));
  std::memcpy(&id, group.unique_id.data(), sizeof(id));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  require<DeviceError>(nvshmemx_set_attr_uniqueid_args(group.rank, group.num_ranks, &id, &attributes) == 0,
                       "NVSHMEM refuses the unique id for rank ", group.rank, " of ", group.num_ranks);
  const int status = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
  require<DeviceError>(status == 0, "NVSHMEM did not begin on rank ", group.rank, " of ", group.num_ranks, ": status ",
                       status, "; NVSHMEM_DEBUG=INFO says more");
  joined = group;
}

std::span<std::byte> allocate_symmetric(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  auto* const data = static_cast<std::byte*>(nvshmem_malloc(size));
  require<DeviceError>(data != nullptr, "NVSHMEM has no ", bytes,
                       " bytes of symmetric memory; where its heap does not ",
                       "grow, NVSHMEM_SYMMETRIC_SIZE sets its size");
  check(cudaMemset(data, 0, size), "clearing the symmetric heap");
  check(cudaDeviceSynchronize(), "clearing the symmetric heap");
  nvshmem_barrier_all();  // nobody writes before all are clear
  return {data, size};
}

}  // namespace distca::cuda
