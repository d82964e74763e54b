// libdistca_nvshmem is the transport over NVSHMEM, between GPUs of any hosts. It lies beside this library and is loaded
// when it is first asked for. A build without the wheel nvidia-nvshmem-cu13 lacks it.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "common/error.h"
#include "transport/streams.h"
#include "transport/transport.h"

namespace distca::transport {

using NvshmemId = std::array<std::byte, 128>;

/// A rank of a group, and its device.
struct NvshmemGroup {
  int rank = 0;
  int num_ranks = 1;
  int device = 0;

  bool operator==(const NvshmemGroup&) const = default;
};

/// The functions that the library offers.
struct NvshmemLibrary {
  /// The version of NVSHMEM that is loaded: "3.4.5"
  std::string (*version)();
  /// Says why the library cannot be used with that version. Empty if it can.
  std::string (*version_problem)();
  /// Makes the id of a world, on one rank. It is taken to the others by any channel.
  NvshmemId (*unique_id)();
  /// Says why this process cannot be that rank, as far as that is known before its peers are asked. Empty if it can.
  std::string (*problem)(const NvshmemGroup& group);
  /// Begins NVSHMEM with these ranks. All of them call it with the id that one of them made. Throws DeviceError if
  /// NVSHMEM does not begin; the other ranks do not learn that from it.
  void (*join)(const NvshmemGroup& group, const NvshmemId& id);
  /// Makes a rank's transport. All ranks, which must have joined, call it with the same sizes. Steps are queued on
  /// `streams`. `control` is a transport between the hosts.
  std::unique_ptr<Transport> (*connect)(const NvshmemGroup& group, int64_t heap_bytes, int64_t num_signals,
                                        int64_t send_arena_bytes, std::unique_ptr<Transport> control,
                                        std::shared_ptr<Streams> streams);
};

/// The library of this process, or null if it is missing or does not load.
DISTCA_EXPORT const NvshmemLibrary* nvshmem_library();
/// Says why there is no library. Empty if there is one.
DISTCA_EXPORT const std::string& nvshmem_library_problem();

/// The name of the function by which the library hands itself over. It exports no other name.
inline constexpr const char* kNvshmemLibraryEntry = "distca_nvshmem_library";

}  // namespace distca::transport
