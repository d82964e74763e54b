// NVSHMEM in this process. It begins once, by unique id, and never ends, because its end is collective and a peer may
// be gone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/nvshmem.h"

namespace distca::cuda {

/// The reason why NVSHMEM cannot begin here as that rank: another world has begun in this process, or the device is not
/// there. Empty if it can.
std::string joining_problem(const transport::NvshmemGroup& group);
/// Begins NVSHMEM with these ranks, unless it has begun; the group's ranks are its PEs. Throws DeviceError where it
/// does not begin.
void join_world(const transport::NvshmemGroup& group, const transport::NvshmemId& id);

/// Allocates zero-filled symmetric memory at the same offset on all ranks, all of which call this with the same size.
/// The memory lives as long as the process, because freeing it is collective too.
std::span<std::byte> allocate_symmetric(int64_t bytes);

/// Whether `is_so_here` is true on any rank. All ranks call it.
bool is_so_on_any_rank(bool is_so_here);

}  // namespace distca::cuda
