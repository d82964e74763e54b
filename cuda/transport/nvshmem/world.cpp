#include "transport/nvshmem/world.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <link.h>
#include <nvshmem_host.h>
#include <nvshmemx.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/check.h"

namespace distca::cuda {

using transport::NvshmemGroup;
using transport::NvshmemId;

namespace {

/// The group, and the rank in it, that this process has joined with.
struct Joined {
  std::mutex mutex;
  std::optional<NvshmemGroup> group;
};
Joined& joined() {
  static Joined instance;
  return instance;
}

/// Whether NVSHMEM has begun. Somebody else in this process may have begun it: PyTorch's symmetric memory does.
bool has_begun() { return nvshmemx_init_status() > NVSHMEM_STATUS_NOT_INITIALIZED; }
bool is_world_of(const NvshmemGroup& group) {
  return nvshmem_my_pe() == group.rank && nvshmem_n_pes() == group.num_ranks;
}

/// Keeps the libraries of networks in memory. Since 3.7 NVSHMEM unloads some of them while the process ends, when its
/// own thread may still be in them.
void keep_network_libraries() {
  std::vector<std::string> names;  // asked for first: the list is locked meanwhile
  const auto note = [](dl_phdr_info* library, size_t, void* to) {
    const std::string_view name = library->dlpi_name;
    for (const std::string_view part : {"nvshmem_transport_", "libibverbs", "libmlx5", "libefa", "libfabric"})
      if (name.find(part) != std::string_view::npos) static_cast<std::vector<std::string>*>(to)->emplace_back(name);
    return 0;
  };
  dl_iterate_phdr(note, &names);
  for (const std::string& name : names) dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

}  // namespace

std::string joining_problem(const NvshmemGroup& group) {
  Joined& j = joined();
  const std::lock_guard lock(j.mutex);
  if (j.group && *j.group != group)
    return message("this process is rank ", j.group->rank, " of ", j.group->num_ranks, " of NVSHMEM on device ",
                   j.group->device, "; a further context must have the same ranks and devices, not rank ", group.rank,
                   " of ", group.num_ranks, " on device ", group.device);
  if (!j.group && has_begun() && !is_world_of(group))
    return message("NVSHMEM has begun in this process already, as PE ", nvshmem_my_pe(), " of ", nvshmem_n_pes(),
                   "; it begins once a process, so it must be with distca's ranks, here rank ", group.rank, " of ",
                   group.num_ranks);
  const cudaError_t device = cudaSetDevice(group.device);
  forget_error();
  return device == cudaSuccess ? "" : message("device ", group.device, ": ", cudaGetErrorString(device));
}

void join_world(const NvshmemGroup& group, const NvshmemId& id) {
  Joined& j = joined();
  const std::lock_guard lock(j.mutex);
  // Without the device NVSHMEM gets no further than finding its peers; the check below says so.
  static_cast<void>(cudaSetDevice(group.device));
  forget_error();
  if (j.group) return;
  nvshmemx_uniqueid_t bytes;
  static_assert(sizeof(bytes) == sizeof(id));
  std::memcpy(&bytes, id.data(), sizeof(id));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  require<DeviceError>(nvshmemx_set_attr_uniqueid_args(group.rank, group.num_ranks, &bytes, &attributes) == 0,
                       "NVSHMEM refuses the unique id for rank ", group.rank, " of ", group.num_ranks);
  // nvshmemx_init_attr calls this function and ends the process where it fails.
  int provided = 0;
  const int error =
      nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID, &attributes,
                           {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION});
  // Without a device that it can use, NVSHMEM says that it is bootstrapped, and ends the process when memory is asked
  // for.
  const int status = nvshmemx_init_status();
  require<DeviceError>(error == 0 && status > NVSHMEM_STATUS_IS_BOOTSTRAPPED, "NVSHMEM did not begin on rank ",
                       group.rank, " of ", group.num_ranks, ", device ", group.device, ": error ", error, ", ",
                       status == NVSHMEM_STATUS_IS_BOOTSTRAPPED ? "it found its peers, but cannot use the device"
                                                                : "it did not find its peers",
                       "; NVSHMEM_DEBUG=INFO says more");
  require<DeviceError>(is_world_of(group), "NVSHMEM made this process PE ", nvshmem_my_pe(), " of ", nvshmem_n_pes(),
                       ", not rank ", group.rank, " of ", group.num_ranks);
  keep_network_libraries();
  j.group = group;
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

bool is_so_on_any_rank(bool is_so_here) {
  // By puts and a barrier: processes that share a GPU have no reductions.
  const int num_ranks = nvshmem_n_pes();
  std::vector<int32_t> of_ranks(static_cast<size_t>(num_ranks));
  const size_t bytes = of_ranks.size() * sizeof(int32_t);
  auto* const words = reinterpret_cast<int32_t*>(allocate_symmetric(static_cast<int64_t>(bytes)).data());
  for (int rank = 0; is_so_here && rank < num_ranks; ++rank) nvshmem_int32_p(words + nvshmem_my_pe(), 1, rank);
  nvshmem_barrier_all();  // all puts are there
  check(cudaMemcpy(of_ranks.data(), words, bytes, cudaMemcpyDeviceToHost), "reading what the ranks said");
  nvshmem_free(words);
  return std::any_of(of_ranks.begin(), of_ranks.end(), [](int32_t word) { return word != 0; });
}

}  // namespace distca::cuda
