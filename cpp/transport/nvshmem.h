// libdistca_nvshmem: the transport over NVSHMEM, between GPUs of any hosts. Loaded from beside this library when it is
// first asked for; a build without the wheel nvidia-nvshmem-cu13 lacks it.
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

/// What the library offers.
struct NvshmemLibrary {
  /// "3.4.5"
  std::string (*version)();
  /// Made on one rank, and taken to the others by any channel.
  NvshmemId (*unique_id)();
  /// Why this process cannot be that rank, as far as it is known before its peers are asked; empty where it can.
  std::string (*problem)(const NvshmemGroup& group);
  /// Begins NVSHMEM with these ranks, who all call it with the id that one of them made. DeviceError where it does not
  /// begin: the other ranks do not learn that by this.
  void (*join)(const NvshmemGroup& group, const NvshmemId& id);
  /// All ranks, who have joined, call it with the same sizes. Steps are queued on `streams`; `control` is a transport
  /// between the hosts.
  std::unique_ptr<Transport> (*connect)(const NvshmemGroup& group, int64_t heap_bytes, int64_t num_signals,
                                        int64_t send_arena_bytes, std::unique_ptr<Transport> control,
                                        std::shared_ptr<Streams> streams);
};

/// Of this process; null where it is missing or does not load.
DISTCA_EXPORT const NvshmemLibrary* nvshmem_library();
/// Why there is no library; empty where there is one.
DISTCA_EXPORT const std::string& nvshmem_library_problem();

/// How the library hands itself over: its only exported name.
inline constexpr const char* kNvshmemLibraryEntry = "distca_nvshmem_library";

}  // namespace distca::transport
